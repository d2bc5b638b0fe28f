#include "kernels/cuda/backward_sm90.cuh"
template rafter::Status rafter::cuda::launch_backward_sm90<rafter::DType::f16, 0>(
    const BackwardParams&, unsigned, void*);
