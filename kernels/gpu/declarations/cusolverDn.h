// cusolverDn.h: the names of it that MindSpore's GPU headers use and no kernel of ours does, for a build without
// cuSOLVER. It stands last in the search path: if the vendor's own header is found, that one is taken.
#ifndef KUNGFU_KERNELS_GPU_CUSOLVER_DN_H_
#define KUNGFU_KERNELS_GPU_CUSOLVER_DN_H_

typedef struct cusolverDnContext* cusolverDnHandle_t;
typedef enum { CUSOLVER_STATUS_SUCCESS = 0 } cusolverStatus_t;

#endif  // KUNGFU_KERNELS_GPU_CUSOLVER_DN_H_
