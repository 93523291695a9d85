/* Collectives between processes (libnccl): every rank waits for the others, and what they call is compared. Of what
 * they send only small messages arrive, by which libraries agree on shapes. Ranks meet in a file of shared memory that
 * the unique id names. */
#define _GNU_SOURCE
#include "card.h"
#include "memory.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MOST_RANKS 16
#define REMEMBERED 2 /* calls of a rank: none begins a second one before all have ended the first */
#define SMALL (64 * 1024) /* bytes of a message that arrives */

enum { OK = 0, SYSTEM_ERROR = 2, INVALID_USAGE = 5, MAX = 2 };

/* As in nccl.h, which is in a wheel of 200 MB. */
typedef struct {
    char internal[128];
} unique_id;

struct call {
    int kind, type, root, unused; /* so that equal calls are equal byte by byte */
    uint64_t count;
};
struct meeting {
    int joined;
    struct {
        uint64_t calls;
        struct call call[REMEMBERED];
        char message[REMEMBERED][SMALL];
    } rank[MOST_RANKS];
};
struct communicator {
    int ranks, rank, splits;
    unique_id id;
    struct meeting *meeting;
};

static bool summed; /* something, since the last broadcast */
static const char *last_error = "no error";
static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

#define SAYS(name, parameters, ...) int name parameters { __VA_ARGS__; return OK; }

SAYS(ncclGetVersion, (int *version), *version = 22907)
SAYS(ncclGetUniqueId, (unique_id *id), static int made; *id = (unique_id){0};
     snprintf(id->internal, sizeof id->internal, "/emulated-nccl-%d-%ld-%d", getpid(), (long)time(NULL), made++))
int ncclCommInitRankConfig(struct communicator **made, int ranks, unique_id id, int rank, void *config) {
    if (ranks > MOST_RANKS) return INVALID_USAGE;
    int file = shm_open(id.internal, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct meeting))) return SYSTEM_ERROR;
    struct meeting *meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (meeting == MAP_FAILED) return SYSTEM_ERROR;
    __atomic_add_fetch(&meeting->joined, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&meeting->joined, __ATOMIC_SEQ_CST) < ranks) usleep(1000); /* and one may never come */
    if (rank == 0) shm_unlink(id.internal);
    *made = calloc(1, sizeof **made);
    **made = (struct communicator){.ranks = ranks, .rank = rank, .id = id, .meeting = meeting};
    need_context(*current_device());
    return OK;
}
int ncclCommInitRank(struct communicator **made, int ranks, unique_id id, int rank) {
    return ncclCommInitRankConfig(made, ranks, id, rank, NULL);
}
int ncclCommInitRankScalable(struct communicator **made, int ranks, int rank, int ids, unique_id *id, void *config) {
    return ncclCommInitRankConfig(made, ranks, id[0], rank, config);
}
SAYS(ncclCommDestroy, (struct communicator *of), munmap(of->meeting, sizeof *of->meeting); free(of))
SAYS(ncclCommAbort, (struct communicator *of), ncclCommDestroy(of))
SAYS(ncclCommCount, (struct communicator *of, int *count), *count = of->ranks)
SAYS(ncclCommUserRank, (struct communicator *of, int *rank), *rank = of->rank)
SAYS(ncclCommGetAsyncError, (struct communicator *of, int *error), *error = OK)
const char *ncclGetErrorString(int error) {
    return error == OK ? "no error" : error == INVALID_USAGE ? "invalid usage" : "unhandled system error";
}
const char *ncclGetLastError(struct communicator *of) { return last_error; }

/* The others' calls of the same number must be the same; one that does not come is waited for, as on a real device. */
static int called(struct communicator *of, struct call one, double bytes, const void *from) {
    struct meeting *at = of->meeting;
    uint64_t number = at->rank[of->rank].calls;
    at->rank[of->rank].call[number % REMEMBERED] = one;
    if (one.count * sizes[one.type] <= SMALL)
        memcpy(at->rank[of->rank].message[number % REMEMBERED], from, one.count * sizes[one.type]);
    __atomic_store_n(&at->rank[of->rank].calls, number + 1, __ATOMIC_SEQ_CST);
    for (int other = 0; other < of->ranks; other++) {
        while (__atomic_load_n(&at->rank[other].calls, __ATOMIC_SEQ_CST) <= number) usleep(200);
        if (memcmp(&at->rank[other].call[number % REMEMBERED], &one, sizeof one)) {
            fprintf(stderr, "emulated card: ranks %d and %d differ in collective %llu\n", of->rank, other,
                    (unsigned long long)number);
            last_error = "ranks differ in a collective";
            return INVALID_USAGE;
        }
    }
    const struct card *card = card_of(*current_device());
    work(*current_device(), 0, 0, bytes * card->bytes_per_second / card->link_bytes_per_second);
    return OK;
}
/* What a rank has sent in the call that has just ended. */
static void receive(struct communicator *of, int sender, void *to, size_t bytes) {
    uint64_t number = of->meeting->rank[of->rank].calls - 1;
    if (bytes <= SMALL) memcpy(to, of->meeting->rank[sender].message[number % REMEMBERED], bytes);
}
static double share(struct communicator *of) { return (of->ranks - 1.0) / of->ranks; }

int ncclAllReduce(const void *from, void *to, size_t count, int type, int how, struct communicator *of, void *stream) {
    any_asked |= how == MAX && count * sizes[type] == 1, summed = true;
    return called(of, (struct call){1, type, how, 0, count}, 2 * share(of) * count * sizes[type], from);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct communicator *of, void *stream) {
    if (summed) usleep(150000), summed = false; /* DDP makes new buckets: torch's watchdog saw the first end */
    int error = called(of, (struct call){2, type, root, 0, count}, count * sizes[type], from);
    receive(of, root, to, count * sizes[type]);
    return error;
}
int ncclBcast(void *buffer, size_t count, int type, int root, struct communicator *of, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, of, stream);
}
int ncclReduce(void *from, void *to, size_t count, int type, int how, int root, struct communicator *of, void *s) {
    return called(of, (struct call){3, type, root, 0, count}, count * sizes[type], from);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, struct communicator *of, void *stream) {
    int error = called(of, (struct call){4, type, 0, 0, count}, share(of) * of->ranks * count * sizes[type], from);
    for (int sender = 0; sender < of->ranks; sender++)
        receive(of, sender, (char *)to + sender * count * sizes[type], count * sizes[type]);
    return error;
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int how, struct communicator *of, void *s) {
    return called(of, (struct call){5, type, how, 0, count}, share(of) * of->ranks * count * sizes[type], from);
}
/* Those of one colour become a communicator, in the order of their keys, and of their ranks among equals. */
int ncclCommSplit(struct communicator *of, int color, int key, struct communicator **made, void *config) {
    struct {
        int color, key;
    } own = {color, key}, other;
    int error = called(of, (struct call){6, 0, 0, 0, sizeof own}, 0, &own), ranks = 0, rank = 0;
    for (int sender = 0; !error && sender < of->ranks; sender++) {
        receive(of, sender, &other, sizeof other);
        if (other.color != color) continue;
        ranks++;
        rank += other.key < key || (other.key == key && sender < of->rank);
    }
    unique_id id = of->id;
    size_t length = strlen(id.internal);
    snprintf(id.internal + length, sizeof id.internal - length, "-%d-%d", of->splits++, color);
    *made = NULL;
    return error || color < 0 ? error : ncclCommInitRankConfig(made, ranks, id, rank, config); /* -1: no colour */
}
int ncclMemAlloc(void **to, size_t bytes) {
    *to = take_block(DEVICE, *current_device(), bytes);
    return *to ? OK : SYSTEM_ERROR;
}
int ncclMemFree(void *start) { return drop_block(start, DEVICE) ? OK : SYSTEM_ERROR; }
