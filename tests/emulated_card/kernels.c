#include "kernels.h"
#include <pthread.h>
#include <search.h>
#include <stdbool.h>
#include <stdlib.h>

/* What the compiler puts around the code, and the head of each part of it: fatbinary_section.h and the output of
 * cuobjdump show the layout. */
struct wrapper { uint32_t magic, version; const void *data; void *unused; };
struct fat { uint32_t magic; uint16_t version, head_bytes; uint64_t bytes; };
struct part {
    uint16_t kind, attributes; uint32_t head_bytes; uint64_t bytes;
    uint32_t packed_bytes, options; uint16_t minor, major; uint32_t architecture;
};
enum { FAT = 0xBA55ED50, PTX = 1, BINARY = 2 };

struct image {
    const struct fat *data;
    bool binaries[128]; /* by architecture */
    int least_ptx;      /* which a driver compiles for any later card; 1000 where there is none */
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
    if (of->data->magic != FAT) return;
    const char *at = (const char *)of->data + of->data->head_bytes, *end = at + of->data->bytes;
    while (at + sizeof(struct part) <= end) {
        const struct part *one = (const struct part *)at;
        if (!one->head_bytes) break;
        if (one->kind == BINARY && one->architecture < 128) of->binaries[one->architecture] = true;
        else if (one->kind == PTX && (int)one->architecture < of->least_ptx) of->least_ptx = (int)one->architecture;
        at += one->head_bytes + one->bytes;
    }
}

/* Functions, in a tree by their addresses. */
struct known {
    const void *function;
    struct image *of;
};
static void *tree;

static int compare(const void *one, const void *other) {
    const char *a = ((const struct known *)one)->function, *b = ((const struct known *)other)->function;
    return (a > b) - (a < b);
}

void note_kernel(const void *function, struct image *of) {
    struct known *one = malloc(sizeof *one);
    *one = (struct known){function, of};
    pthread_mutex_lock(&guard);
    tsearch(one, &tree, compare);
    pthread_mutex_unlock(&guard);
}

int architecture_of(const void *function, int major, int minor) {
    int newest = 10 * major + minor, found = 0;
    pthread_mutex_lock(&guard);
    struct known **one = tfind(&(struct known){function}, &tree, compare);
    struct image *of = one ? (*one)->of : NULL;
    if (of && !of->is_read) read_parts(of);
    pthread_mutex_unlock(&guard);
    if (!of) return newest;
    /* Code runs on cards of its own major version that are no older. */
    for (int code = newest; code >= 10 * major && !found; code--)
        if (of->binaries[code]) found = code;
    return found || of->least_ptx > newest ? found : of->least_ptx;
}
