/* What every library of the emulated machine shares: its cards, who holds which memory, faults, and a virtual clock.
 *
 * All processes that use the cards map one file, named by EMULATED_CARDS, and change it under its lock. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MOST_CARDS 8
#define MOST_PROCESSES 128
#define MIB (1024ull * 1024)
#define GRANULE (2 * MIB) /* of device memory, as a driver hands it out */

struct card {
    char name[96], uuid[48], pci[32];
    int major, minor, multiprocessors, l2_bytes, shared_per_block, shared_per_multiprocessor, bus_bits, link_generation;
    uint64_t total_bytes;    /* what programs can use */
    uint64_t marketed_bytes; /* with the driver's own share */
    uint64_t context_bytes;  /* what each process takes before it has allocated anything */
    int power_limit_watts, default_power_limit_watts, clock_mhz, most_clock_mhz, memory_clock_mhz, temperature;
    uint64_t throttle_reasons;
    double flops_wide, flops_tensor_wide, flops_bf16, flops_fp16, bytes_per_second, link_bytes_per_second;
    /* Faults and other people, which a test sets while programs run. */
    uint64_t taken_bytes;       /* held by a process that is not ours */
    int64_t fail_allocation_at; /* the so many-th allocation from now fails as if memory had run out; 0: none does */
    int error;                  /* a cudaError_t that every call returns from now on; 0: none */
    int64_t error_after;        /* launches until it does */
    bool hangs;                 /* whether calls that wait for the card never come back */
    bool gone;                  /* whether it has fallen off the bus */
};

struct process {
    int pid;
    uint64_t started; /* by the kernel's count: a number that another process gets again is told apart by it */
    uint64_t held_bytes[MOST_CARDS];
    bool has_context[MOST_CARDS];
};

struct machine {
    uint64_t magic;
    int cards;
    int driver_version; /* 13000 for CUDA 13.0 */
    char driver[32];
    struct card card[MOST_CARDS];
    struct process process[MOST_PROCESSES];
};

/* The machine, locked until `unlock`; ends the process with a clear line if there is none. */
struct machine *lock(void);
void unlock(void);
const struct machine *machine(void); /* the same without the lock, for what never changes */

/* The cards that this process sees, by CUDA_VISIBLE_DEVICES, in order: how many, and the number of each. */
int visible_cards(void);
int visible_card(int device);
int *current_device(void); /* of this thread */

/* Take device memory, or give it back; false if the card has no more, or a fault was asked for. */
bool charge(int device, uint64_t bytes);
void release(int device, uint64_t bytes);
void need_context(int device);
uint64_t used_bytes(struct machine *locked, int card); /* by living processes and others, without the driver's share */
uint64_t whole_granules(uint64_t bytes);

/* The error that a call meets now: of the card, or none. A call that waits for the card may never come back. */
int error_of_call(int device);
int error_of_launch(int device);
void wait_for_card(int device);

/* What runtime and driver answer alike: their attributes and errors have the same numbers. */
int attribute_of(const struct card *card, int attribute);
const char *words_of(int error);
const char *name_of(int error);

/* Seconds of the virtual clock, and what moves it on. */
double clock_seconds(void);
void work(int device, double flops, double flops_per_second, double bytes);

void say(const char *format, ...); /* to the file that EMULATED_LOG names, if any */
void lacking(const char *symbol);  /* to standard error, always: something that is not emulated was called */
