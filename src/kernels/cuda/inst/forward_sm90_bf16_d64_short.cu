#include "kernels/cuda/forward_sm90.cuh"
template rafter::Status rafter::cuda::launch_forward_sm90<rafter::DType::bf16, 5>(
    const ForwardParams&, unsigned, void*);
