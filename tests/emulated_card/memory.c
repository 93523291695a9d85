#define _GNU_SOURCE
#include "memory.h"
#include "card.h"
#include <pthread.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MOST_COPIED MIB /* larger copies hold weights or activations: their values mean nothing here */

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

/* A tree of blocks in the order of their addresses, in which those that overlap count as equal. */
static void *blocks;

static int compare(const void *one, const void *other) {
    const struct block *a = one, *b = other;
    return a->start + a->bytes <= b->start ? -1 : b->start + b->bytes <= a->start;
}

static struct block *overlapping(const void *start, size_t bytes) {
    struct block **found = tfind(&(struct block){.start = (char *)start, .bytes = bytes}, &blocks, compare);
    return found ? *found : NULL;
}

/* False, and nothing is done, if another block overlaps it. */
static bool insert(struct block one) {
    pthread_mutex_lock(&guard);
    bool fits = !overlapping(one.start, one.bytes);
    if (fits) tsearch(memcpy(malloc(sizeof one), &one, sizeof one), &blocks, compare);
    pthread_mutex_unlock(&guard);
    return fits;
}

static struct block taken_out(struct block *one) {
    struct block gone = *one;
    tdelete(one, &blocks, compare);
    free(one);
    return gone;
}

static size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

/* The start of `bytes` of address space at a multiple of `alignment`. */
static void *aligned_space(size_t bytes, size_t alignment, int protection) {
    char *from = mmap(NULL, bytes + alignment, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (from == MAP_FAILED) return NULL;
    char *start = (char *)rounded_up((uintptr_t)from, alignment);
    if (start > from) munmap(from, start - from);
    if (from + alignment > start) munmap(start + bytes, from + alignment - start);
    return start;
}

void *take_block(enum place place, int device, size_t bytes) {
    size_t whole = rounded_up(bytes, place == DEVICE ? GRANULE : 4096);
    if (!bytes || (place == DEVICE && !charge(device, whole))) return NULL;
    char *start = aligned_space(whole, GRANULE, PROT_READ | PROT_WRITE);
    if (start) insert((struct block){.start = start, .bytes = whole, .place = place, .device = device});
    else if (place == DEVICE) release(device, whole);
    return start;
}

bool note_block(void *start, size_t bytes) {
    return insert((struct block){.start = start, .bytes = bytes, .place = REGISTERED});
}

bool drop_block(void *start, enum place place) {
    pthread_mutex_lock(&guard);
    struct block *found = overlapping(start, 1), gone = {0};
    if (found && found->start == start && (found->place == place || (found->place == MANAGED && place == DEVICE)))
        gone = taken_out(found);
    pthread_mutex_unlock(&guard);
    if (gone.place && gone.place != REGISTERED) munmap(gone.start, gone.bytes);
    if (gone.place == DEVICE) release(gone.device, gone.bytes);
    return gone.place;
}

struct block block_at(const void *address) {
    pthread_mutex_lock(&guard);
    struct block *found = overlapping(address, 1), shown = found ? *found : (struct block){0};
    pthread_mutex_unlock(&guard);
    return shown;
}

void copy(void *to, const void *from, size_t bytes) {
    if (bytes <= MOST_COPIED) memmove(to, from, bytes);
}

/* Virtual memory. */

struct physical {
    size_t bytes;
    int device, holders;
};

uint64_t take_physical(int device, size_t bytes) {
    if (!charge(device, bytes)) return 0;
    struct physical *made = malloc(sizeof *made);
    *made = (struct physical){.bytes = bytes, .device = device, .holders = 1};
    return (uintptr_t)made;
}

bool drop_physical(uint64_t handle) {
    struct physical *one = (struct physical *)handle;
    if (!one || __atomic_sub_fetch(&one->holders, 1, __ATOMIC_SEQ_CST)) return one;
    release(one->device, one->bytes);
    free(one);
    return true;
}

void *reserve(size_t bytes, size_t alignment) {
    return aligned_space(bytes, alignment > GRANULE ? alignment : GRANULE, PROT_NONE);
}

bool unreserve(void *start, size_t bytes) { return !munmap(start, bytes); }

bool map(void *start, size_t bytes, uint64_t handle) {
    struct physical *of = (struct physical *)handle;
    if (!of || mprotect(start, bytes, PROT_READ | PROT_WRITE)) return false;
    __atomic_add_fetch(&of->holders, 1, __ATOMIC_SEQ_CST);
    return insert((struct block){start, bytes, DEVICE, of->device, handle});
}

/* Everything that is mapped in a stretch of addresses. */
bool unmap(void *start, size_t bytes) {
    struct block *found;
    pthread_mutex_lock(&guard);
    while ((found = overlapping(start, bytes))) drop_physical(taken_out(found).physical);
    pthread_mutex_unlock(&guard);
    madvise(start, bytes, MADV_DONTNEED);
    return !mprotect(start, bytes, PROT_NONE);
}
