// Replaces cusolverDn.h in a build without cuSOLVER. MindSpore's GPU headers use the names that
// this file declares. KungFu's kernels use none of them. This folder is last in the search path, so
// the vendor's own header takes precedence.
#ifndef KUNGFU_KERNELS_GPU_CUSOLVER_DN_H_
#define KUNGFU_KERNELS_GPU_CUSOLVER_DN_H_

typedef struct cusolverDnContext* cusolverDnHandle_t;
typedef enum { CUSOLVER_STATUS_SUCCESS = 0 } cusolverStatus_t;

#endif  // KUNGFU_KERNELS_GPU_CUSOLVER_DN_H_
