/* The shared file: attached on first use, and cleaned of processes that have ended. */
#define _GNU_SOURCE
#include "card.h"
#include <dlfcn.h>
#include <driver_types.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC 0x4544434152443032ull /* changes with the layout, here and in cards.py */

static struct machine *mapped;
static int file = -1;
static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t attaching = PTHREAD_MUTEX_INITIALIZER;

static _Noreturn void give_up(const char *why, const char *path) {
    fprintf(stderr, "emulated card: %s: %s\n", path ? path : "EMULATED_CARDS", why);
    _exit(70);
}

static void attach(void) {
    const char *path = getenv("EMULATED_CARDS");
    if (!path) give_up("not set: it names the file of the machine's cards", NULL);
    file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) give_up(strerror(errno), path);
    struct stat is;
    struct machine *found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (found == MAP_FAILED) give_up(strerror(errno), path);
    if (fstat(file, &is) || (size_t)is.st_size != sizeof *found || found->magic != MAGIC)
        give_up("made by another version: build the card again", path);
    mapped = found;
}

const struct machine *machine(void) {
    if (mapped) return mapped;
    pthread_mutex_lock(&attaching);
    if (!mapped) attach();
    pthread_mutex_unlock(&attaching);
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
    char path[64], text[1024], state = 'X';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int from = open(path, O_RDONLY | O_CLOEXEC);
    if (from < 0) return 0;
    ssize_t length = read(from, text, sizeof text - 1);
    close(from);
    text[length > 0 ? length : 0] = 0;
    const char *name_end = strrchr(text, ')'); /* the name before it may hold anything */
    unsigned long long ticks = 0;              /* the 19th field after the state */
    const char *format = " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu";
    if (name_end) sscanf(name_end + 1, format, &state, &ticks);
    return state == 'Z' || state == 'X' ? 0 : ticks;
}

static bool lives(const struct process *one) { return one->pid && start_of(one->pid) == one->started; }

static struct process *this_process(struct machine *locked) {
    static struct process *own;
    static int own_pid;
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

int instance_of(int card, int number) {
    for (int i = 0; i < machine()->cards; i++)
        if (machine()->card[i].parent == card + 1 && number-- == 0) return i;
    return -1;
}

uint64_t used_bytes(struct machine *locked, int card) {
    uint64_t used = locked->card[card].taken_bytes;
    for (int i = 0; i < MOST_PROCESSES; i++) {
        struct process *one = &locked->process[i];
        if (!one->pid) continue;
        if (lives(one)) used += one->held_bytes[card];
        else *one = (struct process){0};
    }
    for (int number = 0, at; (at = instance_of(card, number)) >= 0; number++) used += used_bytes(locked, at);
    return used;
}

static bool take(struct machine *locked, int card, uint64_t bytes) {
    if (used_bytes(locked, card) + bytes > locked->card[card].total_bytes) return false;
    this_process(locked)->held_bytes[card] += bytes;
    return true;
}

static bool with_context(struct machine *locked, int card) {
    bool *has = &this_process(locked)->has_context[card];
    if (!*has) *has = take(locked, card, locked->card[card].context_bytes);
    return *has;
}

bool charge(int device, uint64_t bytes) {
    struct machine *locked = lock();
    int card = visible_card(device);
    int64_t *countdown = &locked->card[card].fail_allocation_at;
    bool fails = *countdown == 1;
    *countdown -= *countdown > 1;
    bool taken = !fails && with_context(locked, card) && take(locked, card, bytes);
    unlock();
    say("%s %llu bytes of card %d", taken ? "took" : "refused", (unsigned long long)bytes, card);
    return taken;
}

void release(int device, uint64_t bytes) {
    uint64_t *held = &this_process(lock())->held_bytes[visible_card(device)];
    *held -= bytes < *held ? bytes : *held;
    unlock();
}

void need_context(int device) {
    with_context(lock(), visible_card(device));
    unlock();
}

bool has_context(int device) {
    bool has = this_process(lock())->has_context[visible_card(device)];
    unlock();
    return has;
}

/* What a process sees, by CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER (CUDA programming guide, "CUDA environment
 * variables"; of MIG instances, the MIG user guide, "CUDA visible devices"). */

static int seen[MOST_CARDS], seen_count = -1;

/* Whole cards as CUDA counts them: in the order of their slots, but the fastest before all others by default. */
static int in_order(int *order) {
    const struct card *card = machine()->card;
    int count = 0, fastest = 0;
    for (int i = 0; i < machine()->cards; i++)
        if (!card[i].parent) order[count++] = i;
    const char *wanted = getenv("CUDA_DEVICE_ORDER");
    if (wanted && !strcmp(wanted, "PCI_BUS_ID")) return count;
    for (int i = 1; i < count; i++)
        if (card[order[i]].flops_wide > card[order[fastest]].flops_wide) fastest = i;
    int first = order[fastest];
    memmove(order + 1, order, fastest * sizeof *order);
    order[0] = first;
    return count;
}

/* The card that a number, or the beginning of a UUID, stands for; -1 if none, or more than one. */
static int named(const char *word, const int *order, int count) {
    char *end;
    long number = strtol(word, &end, 10);
    if (end != word && !*end) return number >= 0 && number < count ? order[number] : -1;
    if (strncmp(word, "GPU-", 4) && strncmp(word, "MIG-", 4)) return -1;
    int found = -1;
    for (int i = 0; i < machine()->cards; i++) {
        if (strncmp(machine()->card[i].uuid, word, strlen(word))) continue;
        if (found >= 0) return -1;
        found = i;
    }
    return found;
}

static int look(void) {
    int order[MOST_CARDS], cards = in_order(order), count = 0;
    const char *value = getenv("CUDA_VISIBLE_DEVICES");
    char *words = strdup(value ? value : "0,1,2,3,4,5,6,7"), *rest = words, *word, trimmed[64];
    while ((word = strsep(&rest, ",")) && sscanf(word, " %63s", trimmed) == 1) {
        int card = named(trimmed, order, cards);
        if (card < 0) break; /* the list ends at the first that names no card */
        int first = instance_of(card, 0);
        if (first >= 0) card = first; /* a partitioned card stands for its first instance */
        for (int i = 0; i < count; i++)
            if (seen[i] == card) return 0; /* one that is named twice leaves none */
        seen[count++] = card;
    }
    free(words);
    for (int i = 0; i < count; i++) /* a process sees one instance at most, and no whole card beside it */
        if (machine()->card[seen[i]].parent) {
            seen[0] = seen[i];
            return 1;
        }
    return count;
}

int visible_cards(void) { return seen_count < 0 ? seen_count = look() : seen_count; }
int visible_card(int device) { return device >= 0 && device < visible_cards() ? seen[device] : 0; }
const struct card *card_of(int device) { return &machine()->card[visible_card(device)]; }
int *current_device(void) {
    static __thread int current;
    return &current;
}

/* Faults. */

static int met[MOST_CARDS]; /* the error that this process has met on a device: its context is of no more use */

int error_of_call(int device) {
    return card_of(device)->gone ? cudaErrorDevicesUnavailable : visible_cards() ? met[device] : 0;
}

/* The launch of the kernel that meets the error succeeds, for kernels run later; calls after it fail. */
int error_of_launch(int device) {
    int before = error_of_call(device);
    if (card_of(device)->error) {
        struct card *of = &lock()->card[visible_card(device)];
        if (of->error && of->error_after-- <= 0) {
            met[device] = of->error;
            of->memory_errors += of->error == cudaErrorECCUncorrectable;
            of->error = 0;
        }
        unlock();
    }
    return before;
}

void wait_for_card(int device) {
    while (card_of(device)->hangs) usleep(10000);
}

/* The clock: work is done the moment it is asked for, and only moves the time on. */

static double now[MOST_CARDS];

double clock_seconds(int device) { return now[device]; }

bool any_asked;
void work(int device, double flops, double flops_per_second, double bytes) {
    double computing = flops_per_second > 0 ? flops / flops_per_second : 0;
    double moving = bytes / card_of(device)->bytes_per_second;
    now[device] += 5e-6 + (computing > moving ? computing : moving);
}

/* What is said. */

void say(const char *format, ...) {
    static FILE *log;
    const char *path = getenv("EMULATED_LOG");
    if (!path || (!log && !(log = fopen(path, "a")))) return;
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    fprintf(log, "%d: %s\n", getpid(), text);
    fflush(log);
}

void lacking(const char *symbol, void *caller) {
    Dl_info found = {0};
    dladdr(caller, &found);
    const char *asking = found.dli_fname ? found.dli_fname : "a program";
    fprintf(stderr, "emulated card: %s is not emulated; %s asks for it\n", symbol, asking);
}
