#define _GNU_SOURCE
#include "memory.h"
#include "card.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MOST_COPIED MIB /* larger copies hold weights or activations: their values mean nothing here */

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

/* Blocks in order of their addresses. */
static struct block *blocks;
static size_t count, room;

static size_t first_after(const char *address) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].start <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void insert(struct block one) {
    if (count == room) blocks = realloc(blocks, (room = room ? 2 * room : 256) * sizeof *blocks);
    size_t place = first_after(one.start);
    memmove(blocks + place + 1, blocks + place, (count - place) * sizeof *blocks);
    blocks[place] = one;
    count++;
}

static struct block *at(const char *address) {
    size_t place = first_after(address);
    if (!place) return NULL;
    struct block *one = blocks + place - 1;
    return address < one->start + one->bytes ? one : NULL;
}

static void *space(size_t bytes, int protection) {
    void *found = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}

/* The start of `bytes` of address space at a multiple of `alignment`. */
static void *aligned_space(size_t bytes, size_t alignment, int protection) {
    char *from = space(bytes + alignment, protection);
    if (!from) return NULL;
    char *start = (char *)(((uintptr_t)from + alignment - 1) / alignment * alignment);
    if (start > from) munmap(from, start - from);
    if (from + alignment > start) munmap(start + bytes, from + alignment - start);
    return start;
}

void *take_block(enum place place, int device, size_t bytes) {
    size_t whole = place == DEVICE ? whole_granules(bytes) : (bytes + 4095) / 4096 * 4096;
    if (!bytes || (place == DEVICE && !charge(device, whole))) return NULL;
    char *start = aligned_space(whole, GRANULE, PROT_READ | PROT_WRITE);
    if (!start) {
        if (place == DEVICE) release(device, whole);
        return NULL;
    }
    pthread_mutex_lock(&guard);
    insert((struct block){.start = start, .bytes = whole, .place = place, .device = device});
    pthread_mutex_unlock(&guard);
    return start;
}

bool note_block(void *start, size_t bytes) {
    pthread_mutex_lock(&guard);
    bool fresh = !at(start);
    if (fresh) insert((struct block){.start = start, .bytes = bytes, .place = REGISTERED});
    pthread_mutex_unlock(&guard);
    return fresh;
}

bool drop_block(void *start, enum place place) {
    pthread_mutex_lock(&guard);
    struct block *found = at(start), gone = {0};
    if (found && found->start == start && (found->place == place || (found->place == MANAGED && place == DEVICE))) {
        gone = *found;
        memmove(found, found + 1, (blocks + --count - found) * sizeof *blocks);
    }
    pthread_mutex_unlock(&guard);
    if (!gone.start) return false;
    if (gone.place != REGISTERED) munmap(gone.start, gone.bytes);
    if (gone.place == DEVICE) release(gone.device, gone.bytes);
    return true;
}

struct block block_at(const void *address) {
    pthread_mutex_lock(&guard);
    struct block *found = at(address), shown = {0};
    if (found) shown = *found;
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

struct range { /* what is mapped where; in no order, for they are few and short-lived */
    char *start;
    size_t bytes;
    struct physical *of;
};

static struct range *ranges;
static size_t range_count, range_room;

uint64_t take_physical(int device, size_t bytes) {
    if (!charge(device, bytes)) return 0;
    struct physical *made = malloc(sizeof *made);
    *made = (struct physical){.bytes = bytes, .device = device, .holders = 1};
    return (uintptr_t)made;
}

bool keep_physical(uint64_t handle) {
    if (handle) __atomic_add_fetch(&((struct physical *)(uintptr_t)handle)->holders, 1, __ATOMIC_SEQ_CST);
    return handle;
}

bool drop_physical(uint64_t handle) {
    struct physical *one = (struct physical *)(uintptr_t)handle;
    if (!one) return false;
    if (__atomic_sub_fetch(&one->holders, 1, __ATOMIC_SEQ_CST)) return true;
    release(one->device, one->bytes);
    free(one);
    return true;
}

void *reserve(size_t bytes, size_t alignment) {
    return aligned_space(bytes, alignment > GRANULE ? alignment : GRANULE, PROT_NONE);
}

bool unreserve(void *start, size_t bytes) { return !munmap(start, bytes); }

bool map(void *start, size_t bytes, uint64_t handle) {
    struct physical *of = (struct physical *)(uintptr_t)handle;
    if (!keep_physical(handle) || mprotect(start, bytes, PROT_READ | PROT_WRITE)) return false;
    pthread_mutex_lock(&guard);
    insert((struct block){.start = start, .bytes = bytes, .place = DEVICE, .device = of->device});
    if (range_count == range_room)
        ranges = realloc(ranges, (range_room = range_room ? 2 * range_room : 256) * sizeof *ranges);
    ranges[range_count++] = (struct range){.start = start, .bytes = bytes, .of = of};
    pthread_mutex_unlock(&guard);
    return true;
}

/* Everything that is mapped in a stretch of addresses. */
bool unmap(void *start, size_t bytes) {
    char *from = start;
    pthread_mutex_lock(&guard);
    for (size_t i = 0; i < range_count;) {
        if (ranges[i].start < from || ranges[i].start >= from + bytes) {
            i++;
            continue;
        }
        struct block *found = at(ranges[i].start);
        memmove(found, found + 1, (blocks + --count - found) * sizeof *blocks);
        drop_physical((uintptr_t)ranges[i].of);
        ranges[i] = ranges[--range_count];
    }
    pthread_mutex_unlock(&guard);
    madvise(start, bytes, MADV_DONTNEED);
    return !mprotect(start, bytes, PROT_NONE);
}
