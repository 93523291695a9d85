/* Products of matrices with something added to them (libcublasLt). */
#include "card.h"
#include <stddef.h>

/* As in cublasLt.h, which is in a wheel of half a gigabyte. */
struct heuristic {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

/* One algorithm, which needs no workspace, whatever is asked for. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, struct heuristic *shown, int *found) {
    shown[0] = (struct heuristic){0};
    *found = 1;
    return 0;
}
int cublasLtMatmul(void *handle, void *product) {
    work(*current_device(), 0, 0, 64 * MIB); /* its shapes are in descriptors that nobody has filled */
    return 0;
}
