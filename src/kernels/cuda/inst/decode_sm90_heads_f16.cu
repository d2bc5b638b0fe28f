#include "kernels/cuda/decode_sm90_heads.cuh"
template rafter::Status rafter::cuda::launch_decode_sm90_heads<rafter::DType::f16, 0>(
    const DecodeParams&, unsigned, void*);
template rafter::Status rafter::cuda::launch_decode_sm90_heads<rafter::DType::f16, 1>(
    const DecodeParams&, unsigned, void*);
