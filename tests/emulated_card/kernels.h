/* Kernels, by the addresses of the functions that launch them: for which cards there is code. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

struct image; /* one binary for several kinds of card */

struct image *kernels_of(const void *wrapper);
void note_kernel(const void *function, struct image *of, const char *name);
bool has_image(const void *function, int major, int minor); /* true where nothing is known of it */
double bytes_of_launch(const void *function, uint64_t blocks, uint64_t threads);
