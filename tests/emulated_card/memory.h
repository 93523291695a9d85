/* Addresses and what lies at them. Device memory is address space that nobody touches: what a program writes there by
 * itself (small copies from the host) takes host memory, what kernels would write takes none. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum place { NOWHERE, DEVICE, MANAGED, PINNED, REGISTERED };

struct block {
    char *start;
    size_t bytes;
    enum place place;
    int device;
    uint64_t physical; /* what is mapped here, by its handle; 0 unless the program maps memory by itself */
};

/* NULL if the device, or the host, has no more. */
void *take_block(enum place place, int device, size_t bytes);
/* Note host memory that the program has by itself; false if it is noted already. */
bool note_block(void *start, size_t bytes);
bool drop_block(void *start, enum place place);
struct block block_at(const void *address); /* .place is NOWHERE where nothing is */
void copy(void *to, const void *from, size_t bytes);

/* Physical memory of the virtual memory functions, and address ranges it is put in. */
uint64_t take_physical(int device, size_t bytes); /* a handle; 0 if the device has no more */
bool drop_physical(uint64_t handle);              /* given back with its last mapping and holder */
void *reserve(size_t bytes, size_t alignment);
bool unreserve(void *start, size_t bytes);
bool map(void *start, size_t bytes, uint64_t handle);
bool unmap(void *start, size_t bytes);
