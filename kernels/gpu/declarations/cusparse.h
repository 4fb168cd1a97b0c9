// Replaces cusparse.h in a build without cuSPARSE. MindSpore's GPU headers use the names that this
// file declares. KungFu's kernels use none of them. This folder is last in the search path, so the
// vendor's own header takes precedence.
#ifndef KUNGFU_KERNELS_GPU_CUSPARSE_H_
#define KUNGFU_KERNELS_GPU_CUSPARSE_H_

typedef struct cusparseContext* cusparseHandle_t;
typedef enum { CUSPARSE_STATUS_SUCCESS = 0 } cusparseStatus_t;

#endif  // KUNGFU_KERNELS_GPU_CUSPARSE_H_
