#include "kernels/cuda/half_fused_sm90.cuh"
template rafter::Status rafter::cuda::launch_half_fused<rafter::DType::f16>(const HalfFusedParams&,
                                                                            void*);
