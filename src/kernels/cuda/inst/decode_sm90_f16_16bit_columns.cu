#include "kernels/cuda/decode_sm90_columns.cuh"
template rafter::Status rafter::cuda::launch_decode_sm90_columns<rafter::DType::f16, 0, 0>(
    const DecodeParams&, const DecodeMaps&, bool, unsigned, void*);
template rafter::Status rafter::cuda::launch_decode_sm90_columns<rafter::DType::f16, 0, 1>(
    const DecodeParams&, const DecodeMaps&, bool, unsigned, void*);
template rafter::Status rafter::cuda::launch_decode_sm90_columns<rafter::DType::f16, 0, 2>(
    const DecodeParams&, const DecodeMaps&, bool, unsigned, void*);
