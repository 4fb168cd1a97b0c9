// Replaces cublas_v2.h in a build without cuBLAS. MindSpore's GPU headers use the names that this
// file declares. KungFu's kernels use none of them. This folder is last in the search path, so the
// vendor's own header takes precedence.
#ifndef KUNGFU_KERNELS_GPU_CUBLAS_V2_H_
#define KUNGFU_KERNELS_GPU_CUBLAS_V2_H_

typedef struct cublasContext* cublasHandle_t;
typedef enum {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_NOT_INITIALIZED = 1,
  CUBLAS_STATUS_ALLOC_FAILED = 3,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_ARCH_MISMATCH = 8,
  CUBLAS_STATUS_MAPPING_ERROR = 11,
  CUBLAS_STATUS_EXECUTION_FAILED = 13,
  CUBLAS_STATUS_INTERNAL_ERROR = 14,
  CUBLAS_STATUS_NOT_SUPPORTED = 15,
  CUBLAS_STATUS_LICENSE_ERROR = 16,
} cublasStatus_t;

#endif  // KUNGFU_KERNELS_GPU_CUBLAS_V2_H_
