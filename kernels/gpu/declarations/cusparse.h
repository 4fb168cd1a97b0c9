// cusparse.h: the names of it that MindSpore's GPU headers use and no kernel of ours does, for a build without
// cuSPARSE. It stands last in the search path: if the vendor's own header is found, that one is taken.
#ifndef KUNGFU_KERNELS_GPU_CUSPARSE_H_
#define KUNGFU_KERNELS_GPU_CUSPARSE_H_

typedef struct cusparseContext* cusparseHandle_t;
typedef enum { CUSPARSE_STATUS_SUCCESS = 0 } cusparseStatus_t;

#endif  // KUNGFU_KERNELS_GPU_CUSPARSE_H_
