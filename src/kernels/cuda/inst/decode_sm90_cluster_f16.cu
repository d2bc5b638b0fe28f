#include "kernels/cuda/decode_sm90_cluster.cuh"
template rafter::Status rafter::cuda::launch_decode_sm90_cluster<rafter::DType::f16, 0>(
    const DecodeParams&, bool, unsigned, unsigned, void*);
template rafter::Status rafter::cuda::launch_decode_sm90_cluster<rafter::DType::f16, 1>(
    const DecodeParams&, bool, unsigned, unsigned, void*);
