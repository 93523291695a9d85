/* What every library of the emulated machine shares: its cards, who holds which memory, faults, and a virtual clock.
 *
 * All processes that use the cards map one file, named by EMULATED_CARDS, and change it under its lock. `cards.py`
 * makes the file and knows its layout. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MOST_CARDS 8 /* with MIG instances, each of which is a card of its own */
#define MOST_PROCESSES 128
#define MIB (1024ull * 1024)
#define GRANULE (2 * MIB) /* of device memory, as a driver hands it out */

struct card {
    char name[96], uuid[48], pci[32];
    int major, minor, multiprocessors, l2_bytes, shared_per_block, shared_per_multiprocessor, bus_bits, link_generation;
    uint64_t total_bytes;    /* what programs can use */
    uint64_t marketed_bytes; /* with the driver's own share */
    uint64_t context_bytes;  /* what each process takes before it has allocated anything */
    int power_limit_watts, default_power_limit_watts, clock_mhz, most_clock_mhz, memory_clock_mhz;
    uint64_t throttle_reasons;
    double flops_wide, flops_bf16, flops_fp16, bytes_per_second, link_bytes_per_second;
    /* Faults and other people, which a test sets while programs run. */
    uint64_t taken_bytes;       /* held by a process that is not ours */
    int64_t fail_allocation_at; /* the so many-th from now fails, and all later ones, until this is 0 */
    int error;                  /* a cudaError_t that one launch meets, and its process from then on; 0: none */
    int memory_errors;          /* that could not be corrected, so far */
    int64_t error_after;        /* launches before the one that meets the error */
    bool hangs;                 /* whether calls that wait for the card never come back */
    bool gone;                  /* whether it has fallen off the bus */
    bool lacks_virtual_memory;  /* as under WSL2 and on a vGPU */
    int8_t parent;              /* of a MIG instance, the place of its card, counted from 1; 0: a whole card */
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

/* The devices that this process sees: how many, and the place of each among the machine's cards. */
int visible_cards(void);
int visible_card(int device);
const struct card *card_of(int device);
int *current_device(void); /* of this thread */
int instance_of(int card, int number); /* the place of a card's MIG instance; -1 if it has no such one */

/* Take device memory, or give it back; false if the card has no more, or a fault was asked for. */
bool charge(int device, uint64_t bytes);
void release(int device, uint64_t bytes);
void need_context(int device);
bool has_context(int device);
uint64_t used_bytes(struct machine *locked, int card); /* by living processes and others, without the driver's share */

/* The error that a call meets now: of the card, or none. A call that waits for the card may never come back. */
int error_of_call(int device);
int error_of_launch(int device);
void wait_for_card(int device);

/* What runtime and driver answer alike: their attributes and errors have the same numbers. */
int attribute_of(const struct card *card, int attribute);
void uuid_of(const struct card *card, unsigned char bytes[16]);
const char *words_of(int error);
const char *name_of(int error);

/* Seconds of a device's virtual clock, and what moves it on. */
double clock_seconds(int device);
extern bool any_asked; /* torch, or a rank, has asked whether any of many is true, and is not yet answered */
void work(int device, double flops, double flops_per_second, double bytes);

void say(const char *format, ...); /* to the file that EMULATED_LOG names, if any */
/* To standard error, always: something was called that is not emulated, by the code at that address. */
void lacking(const char *symbol, void *caller);
