/* The shared file: attached on first use, and cleaned of processes that have ended. */
#define _GNU_SOURCE
#include "card.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC 0x4544434152443031ull /* changes with the layout */

static struct machine *mapped;
static int file = -1;
static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t attaching = PTHREAD_MUTEX_INITIALIZER;
static int own_pid;
static struct process *own;

static _Noreturn void give_up(const char *why, const char *path) {
    fprintf(stderr, "emulated card: %s: %s\n", path ? path : "EMULATED_CARDS", why);
    _exit(70);
}

static void attach(void) {
    pthread_mutex_lock(&attaching);
    if (!mapped) {
        const char *path = getenv("EMULATED_CARDS");
        if (!path) give_up("not set: it names the file of the machine's cards", NULL);
        file = open(path, O_RDWR | O_CLOEXEC);
        if (file < 0) give_up(strerror(errno), path);
        struct stat is;
        if (fstat(file, &is) || (size_t)is.st_size < sizeof(struct machine)) give_up("not a machine's file", path);
        struct machine *found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (found == MAP_FAILED) give_up(strerror(errno), path);
        if (found->magic != MAGIC) give_up("made by another version: build the card again", path);
        mapped = found;
    }
    pthread_mutex_unlock(&attaching);
}

/* Made by the tests, through Python's ctypes: an empty machine with the given cards. */
int emulated_create(const char *path, const struct card *cards, int count, const char *driver, int version) {
    struct machine made = {.magic = MAGIC, .cards = count, .driver_version = version};
    if (count > MOST_CARDS) return -1;
    memcpy(made.card, cards, count * sizeof *cards);
    snprintf(made.driver, sizeof made.driver, "%s", driver);
    int to = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (to < 0) return -1;
    bool written = write(to, &made, sizeof made) == (ssize_t)sizeof made;
    close(to);
    return written ? 0 : -1;
}

size_t emulated_machine_size(void) { return sizeof(struct machine); }
size_t emulated_card_size(void) { return sizeof(struct card); }

const struct machine *machine(void) {
    if (!mapped) attach();
    return mapped;
}

struct machine *lock(void) {
    machine();
    pthread_mutex_lock(&threads);
    /* A lock of the file, because one that a process holds ends with it. After a fork the child shares its parent's
     * open file and with it the lock, so it opens the file anew. */
    static int pid;
    if (pid != getpid()) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        int again = open(link, O_RDWR | O_CLOEXEC);
        if (again >= 0) file = again;
        pid = getpid();
    }
    while (flock(file, LOCK_EX) && errno == EINTR) {}
    return mapped;
}

void unlock(void) {
    flock(file, LOCK_UN);
    pthread_mutex_unlock(&threads);
}

/* When a process began, in the kernel's ticks; 0 if it has ended, also if nobody has waited for it yet. */
static uint64_t start_of(int pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int from = open(path, O_RDONLY | O_CLOEXEC);
    if (from < 0) return 0;
    ssize_t length = read(from, text, sizeof text - 1);
    close(from);
    if (length <= 0) return 0;
    text[length] = 0;
    char *after = strrchr(text, ')'); /* the name before it may hold anything */
    if (!after || after[2] == 'Z' || after[2] == 'X') return 0;
    unsigned long long ticks = 0;
    int field = 2;
    for (char *at = after + 1; *at && field < 22; at++)
        if (*at == ' ' && ++field == 22) ticks = strtoull(at + 1, NULL, 10);
    return ticks;
}

static bool lives(const struct process *one) { return one->pid && start_of(one->pid) == one->started; }

static struct process *this_process(struct machine *locked) {
    if (own_pid == getpid()) return own;
    for (int i = 0; i < MOST_PROCESSES; i++) {
        struct process *one = &locked->process[i];
        if (lives(one)) continue;
        *one = (struct process){.pid = getpid(), .started = start_of(getpid())};
        own_pid = getpid();
        return own = one;
    }
    give_up("too many processes", NULL);
}

uint64_t used_bytes(struct machine *locked, int card) {
    uint64_t used = locked->card[card].taken_bytes;
    for (int i = 0; i < MOST_PROCESSES; i++) {
        struct process *one = &locked->process[i];
        if (!one->pid) continue;
        if (lives(one)) used += one->held_bytes[card];
        else *one = (struct process){0};
    }
    return used;
}

uint64_t whole_granules(uint64_t bytes) { return (bytes + GRANULE - 1) / GRANULE * GRANULE; }

static bool take(struct machine *locked, int card, uint64_t bytes) {
    struct card *of = &locked->card[card];
    struct process *one = this_process(locked);
    if (of->fail_allocation_at && --of->fail_allocation_at == 0) return false;
    if (used_bytes(locked, card) + bytes > of->total_bytes) return false;
    one->held_bytes[card] += bytes;
    return true;
}

static bool with_context(struct machine *locked, int card) {
    struct process *one = this_process(locked);
    if (!one->has_context[card]) one->has_context[card] = take(locked, card, locked->card[card].context_bytes);
    return one->has_context[card];
}

bool charge(int device, uint64_t bytes) {
    struct machine *locked = lock();
    int card = visible_card(device);
    bool taken = with_context(locked, card) && take(locked, card, bytes);
    unlock();
    say("%s %llu bytes of card %d", taken ? "took" : "refused", (unsigned long long)bytes, card);
    return taken;
}

void release(int device, uint64_t bytes) {
    struct machine *locked = lock();
    struct process *one = this_process(locked);
    int card = visible_card(device);
    one->held_bytes[card] -= bytes < one->held_bytes[card] ? bytes : one->held_bytes[card];
    unlock();
}

void need_context(int device) {
    struct machine *locked = lock();
    with_context(locked, visible_card(device));
    unlock();
}

/* CUDA_VISIBLE_DEVICES: numbers or the beginnings of UUIDs, up to the first that names no card (CUDA programming guide,
 * "CUDA environment variables"). By default the fastest card has the number 0; here the order is that of the slots. */
static int seen[MOST_CARDS], seen_count = -1;

static void look(void) {
    const struct machine *of = machine();
    const char *value = getenv("CUDA_VISIBLE_DEVICES");
    int count = 0;
    if (!value) {
        for (; count < of->cards; count++) seen[count] = count;
    } else {
        char *words = strdup(value), *rest = words, *word;
        while (count < MOST_CARDS && (word = strsep(&rest, ","))) {
            while (*word == ' ') word++;
            char *end;
            long number = strtol(word, &end, 10);
            int named = *word && !*end && number >= 0 && number < of->cards ? (int)number : -1;
            for (int card = 0; named < 0 && strlen(word) > 4 && card < of->cards; card++)
                if (!strncmp(of->card[card].uuid, word, strlen(word))) named = card;
            if (named < 0) break;
            bool twice = false;
            for (int i = 0; i < count; i++) twice |= seen[i] == named;
            if (twice) {
                count = 0;
                break;
            }
            seen[count++] = named;
        }
        free(words);
    }
    seen_count = count;
}

int visible_cards(void) {
    if (seen_count < 0) look();
    return seen_count;
}

int visible_card(int device) {
    int count = visible_cards();
    return device >= 0 && device < count ? seen[device] : 0;
}

int *current_device(void) {
    static __thread int current;
    return &current;
}

/* Faults. */

int error_of_call(int device) {
    const struct card *of = &machine()->card[visible_card(device)];
    if (of->gone) return 999; /* cudaErrorUnknown, as a card that has fallen off the bus reports itself */
    return of->error_after > 0 ? 0 : of->error;
}

int error_of_launch(int device) {
    const struct card *of = &machine()->card[visible_card(device)];
    if (of->error && of->error_after > 0) {
        struct machine *locked = lock();
        locked->card[visible_card(device)].error_after--;
        unlock();
    }
    return error_of_call(device);
}

void wait_for_card(int device) {
    while (machine()->card[visible_card(device)].hangs) usleep(10000);
}

/* The clock: work is done the moment it is asked for, and only moves the time on. */

static double now[MOST_CARDS];

double clock_seconds(void) { return now[0]; }

void work(int device, double flops, double flops_per_second, double bytes) {
    const struct card *of = &machine()->card[visible_card(device)];
    double computing = flops_per_second > 0 ? flops / flops_per_second : 0, moving = bytes / of->bytes_per_second;
    now[device] += 5e-6 + (computing > moving ? computing : moving);
}

void say(const char *format, ...) {
    static FILE *log;
    static bool asked;
    if (!asked) {
        const char *path = getenv("EMULATED_LOG");
        log = path ? fopen(path, "a") : NULL;
        asked = true;
    }
    if (!log) return;
    va_list values;
    va_start(values, format);
    fprintf(log, "%d: ", getpid());
    vfprintf(log, format, values);
    fputc('\n', log);
    fflush(log);
    va_end(values);
}

void lacking(const char *symbol) { fprintf(stderr, "emulated card: %s is not emulated\n", symbol); }
