#include "kernels/cuda/half_fused_sm90.cuh"
template rafter::Status rafter::cuda::launch_half_fused<rafter::DType::bf16>(const HalfFusedParams&,
                                                                             void*);
