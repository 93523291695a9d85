#include "kernels.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* What the compiler puts around the code, and the head of each part of it: fatbinary_section.h and the output of
 * cuobjdump show the layout. */
struct wrapper {
    uint32_t magic, version;
    const void *data;
    void *unused;
};
struct fat {
    uint32_t magic;
    uint16_t version, head_bytes;
    uint64_t bytes;
};
struct part {
    uint16_t kind, attributes;
    uint32_t head_bytes;
    uint64_t bytes;
    uint32_t packed_bytes, options;
    uint16_t minor, major;
    uint32_t architecture;
};
enum { FAT = 0xBA55ED50, PTX = 1, BINARY = 2 };

struct image {
    const struct fat *data;
    uint64_t binaries; /* a bit for each architecture from 0 to 127, of two words */
    uint64_t more_binaries;
    int least_ptx; /* which a driver compiles for any later card; 1000 where there is none */
    bool is_read;
};

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

struct image *kernels_of(const void *wrapper) {
    struct image *made = calloc(1, sizeof *made);
    made->data = ((const struct wrapper *)wrapper)->data;
    return made;
}

static void read_parts(struct image *of) {
    of->least_ptx = 1000;
    of->is_read = true;
    if (!of->data || of->data->magic != FAT) return;
    const char *at = (const char *)of->data + of->data->head_bytes, *end = at + of->data->bytes;
    while (at + sizeof(struct part) <= end) {
        const struct part *one = (const struct part *)at;
        if (!one->head_bytes) break;
        if (one->kind == BINARY && one->architecture < 64) of->binaries |= 1ull << one->architecture;
        else if (one->kind == BINARY && one->architecture < 128) of->more_binaries |= 1ull << (one->architecture - 64);
        else if (one->kind == PTX && (int)one->architecture < of->least_ptx) of->least_ptx = (int)one->architecture;
        at += one->head_bytes + one->bytes;
    }
}

/* Functions, in a table that grows. */
struct known {
    const void *function;
    struct image *of;
    const char *name;
};
static struct known *table;
static size_t filled, places;

static struct known *find(const void *function) {
    size_t place = ((uintptr_t)function >> 4) * 0x9E3779B97F4A7C15ull % places;
    while (table[place].function && table[place].function != function) place = (place + 1) % places;
    return table + place;
}

void note_kernel(const void *function, struct image *of, const char *name) {
    pthread_mutex_lock(&guard);
    if (2 * filled >= places) {
        struct known *old = table;
        size_t had = places;
        places = places ? 2 * places : 1 << 14;
        table = calloc(places, sizeof *table);
        for (size_t i = 0; i < had; i++)
            if (old[i].function) *find(old[i].function) = old[i];
        free(old);
    }
    struct known *one = find(function);
    filled += !one->function;
    *one = (struct known){function, of, name};
    pthread_mutex_unlock(&guard);
}

int architecture_of(const void *function, int major, int minor) {
    pthread_mutex_lock(&guard);
    struct known *one = places ? find(function) : NULL;
    int newest = 10 * major + minor, found = 0;
    if (one && one->function && one->of->data) {
        if (!one->of->is_read) read_parts(one->of);
        /* Code runs on cards of its own major version that are no older. */
        for (int of = newest; of >= 10 * major && !found; of--)
            if ((of < 64 ? one->of->binaries >> of : one->of->more_binaries >> (of - 64)) & 1) found = of;
        if (!found && one->of->least_ptx <= newest) found = one->of->least_ptx;
    } else {
        found = newest;
    }
    pthread_mutex_unlock(&guard);
    return found;
}

double bytes_of_launch(const void *function, uint64_t blocks, uint64_t threads) {
    return 16.0 * (double)(blocks * threads); /* four bytes, four times: most kernels read and write vectors */
}
