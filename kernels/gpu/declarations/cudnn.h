// Replaces cudnn.h in a build without cuDNN. MindSpore's GPU headers use the names that this file
// declares. KungFu's kernels use none of them. This folder is last in the search path, so the
// vendor's own header takes precedence.
#ifndef KUNGFU_KERNELS_GPU_CUDNN_H_
#define KUNGFU_KERNELS_GPU_CUDNN_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

typedef struct cudnnContext* cudnnHandle_t;
typedef struct cudnnTensorStruct* cudnnTensorDescriptor_t;
typedef enum { CUDNN_STATUS_SUCCESS = 0 } cudnnStatus_t;
typedef enum {
  CUDNN_DATA_FLOAT = 0,
  CUDNN_DATA_DOUBLE = 1,
  CUDNN_DATA_HALF = 2,
  CUDNN_DATA_INT8 = 3,
  CUDNN_DATA_INT32 = 4,
  CUDNN_DATA_UINT8 = 6,
} cudnnDataType_t;

#endif  // KUNGFU_KERNELS_GPU_CUDNN_H_
