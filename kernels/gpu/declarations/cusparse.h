// Replaces cusparse.h in a build without cuSPARSE. It declares the names that MindSpore's GPU headers use; KungFu's
// kernels use none of them. It is last in the search path, so the vendor's own header takes precedence.
#ifndef KUNGFU_KERNELS_GPU_CUSPARSE_H_
#define KUNGFU_KERNELS_GPU_CUSPARSE_H_

typedef struct cusparseContext* cusparseHandle_t;
typedef enum { CUSPARSE_STATUS_SUCCESS = 0 } cusparseStatus_t;

#endif  // KUNGFU_KERNELS_GPU_CUSPARSE_H_
