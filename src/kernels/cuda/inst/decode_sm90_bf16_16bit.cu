#include "kernels/cuda/decode_sm90.cuh"
template rafter::Status rafter::cuda::launch_decode_sm90<rafter::DType::bf16, 0>(
    const DecodeParams&, const DecodeMaps&, bool, unsigned, void*);
template rafter::Status rafter::cuda::launch_decode_sm90<rafter::DType::bf16, 1>(
    const DecodeParams&, const DecodeMaps&, bool, unsigned, void*);
template rafter::Status rafter::cuda::launch_decode_sm90<rafter::DType::bf16, 2>(
    const DecodeParams&, const DecodeMaps&, bool, unsigned, void*);
