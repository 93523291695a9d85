/* Products of matrices (libcublas): nothing is computed, and the clock moves on. */
#include "card.h"
#include <library_types.h>
#include <stdlib.h>
#include <string.h>

/* cublas_api.h is in a wheel of half a gigabyte: arguments up to the last that is needed are said here. */
static double rate(int type) {
    const struct card *card = card_of(*current_device());
    return type == CUDA_R_16BF ? card->flops_bf16 : type == CUDA_R_16F ? card->flops_fp16 : card->flops_wide;
}
static int multiplied(int type, double m, double n, double k, double count) {
    double bytes = type == CUDA_R_32F ? 4 : 2;
    work(*current_device(), 2 * m * n * k * count, rate(type), bytes * count * (m * k + k * n + m * n));
    return 0;
}

int cublasSgemm_v2(void *handle, int ta, int tb, int m, int n, int k) { return multiplied(CUDA_R_32F, m, n, k, 1); }
int cublasGemmEx(void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int type) {
    return multiplied(type, m, n, k, 1);
}
int cublasSgemmStridedBatched(void *handle, int ta, int tb, int m, int n, int k, const float *alpha, const void *a,
                              int lda, long long sa, const void *b, int ldb, long long sb, const float *beta, void *c,
                              int ldc, long long sc, int count) {
    return multiplied(CUDA_R_32F, m, n, k, count);
}
int cublasGemmStridedBatchedEx(void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                               int type, int lda, long long sa, const void *b, int b_type, int ldb, long long sb,
                               const void *beta, void *c, int c_type, int ldc, long long sc, int count) {
    return multiplied(type, m, n, k, count);
}
