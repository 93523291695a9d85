/* Kernels, by the addresses of the functions that launch them: for which cards there is code. */
#pragma once
#include <stdint.h>

struct image; /* one binary for several kinds of card */

struct image *kernels_of(const void *wrapper);
void note_kernel(const void *function, struct image *of);
/* Of the code that a card would run, 86 for 8.6; 0 if there is none for it, its own where nothing is known. */
int architecture_of(const void *function, int major, int minor);
