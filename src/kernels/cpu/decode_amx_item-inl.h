// One item of decode on tiles (decode_amx_products-inl.h, decode_amx_values-inl.h): tiles of 64
// keys that all of four query rows see. Any other goes through the vectors of the same file.
// Compiled once per instruction set (Highway's foreach_target).
#if defined(RAFTER_DECODE_AMX_ITEM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_DECODE_AMX_ITEM_INL_H_
#undef RAFTER_DECODE_AMX_ITEM_INL_H_
#else
#define RAFTER_DECODE_AMX_ITEM_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/checked.h"
#include "hwy/highway.h"
#include "kernels/cpu/decode_amx_products-inl.h"
#include "kernels/cpu/decode_amx_values-inl.h"
#include "kernels/cpu/decode_simd_item-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::decode_simd {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET != HWY_SCALAR && RAFTER_HAS_AMX_CODE

template <DType kKv, typename Machine>
class TileItem : public Item<kKv, TileItem<kKv, Machine>> {
  using Base = Item<kKv, TileItem>;
  friend Base;

 public:
  using Base::Base;

  void compute() {
    this->attend();
    if constexpr (kKv == DType::bf16) {
      // in a product on tiles, a value that is not finite meets weights of zero beside it
      if (fits_tiles() && !finite()) {
        careful_ = true;
        packed_ = 0;
        this->attend();
      }
    }
    this->write(column_order<kKv, Machine>(run_));
  }

 private:
  using Base::first_head_;
  using Base::last_head_;
  using Base::rows_;
  using Base::run_;
  using Base::scratch_;
  using typename Base::Found;

  TileQueries tile_queries(std::int64_t head, std::int64_t row) const {
    const tiles::DecodeLayout& layout = run_.layout;
    float* const at = this->of_head(head) + layout.tile_q + row * layout.tile_row;
    const std::int64_t words = run_.problem().head_dim / kTileDepth<kKv> * 16 * kQueryColumns<kKv>;
    return {reinterpret_cast<std::uint32_t*>(at), at + words};
  }

  bool fits_tiles() const {
    return tiles::decode_fits_tiles(sizeof(Element<kKv>), run_.problem().head_dim,
                                    run_.problem().head_dim_v);
  }

  void pack_head(std::int64_t head) const {
    const tiles::DecodeLayout& layout = run_.layout;
    const std::int64_t head_dim = run_.problem().head_dim;
    if (kKv == DType::int8 || !fits_tiles()) {
      this->pack_queries(head);
    }
    for (std::int64_t row = 0; row < rows_ && fits_tiles(); row += 4) {
      if constexpr (kKv == DType::int8) {
        pack_tile_digits(this->of_head(head) + layout.q + row * layout.depth, layout.depth,
                         head_dim, tile_queries(head, row));
      } else {
        const auto* const q = static_cast<const std::uint16_t*>(run_.call.in.q.data);
        const std::uint16_t* rows[4] = {};
        for (std::int64_t r = 0; r < std::min<std::int64_t>(4, rows_ - row); ++r) {
          rows[r] = q + this->query_offset(head, row + r);
        }
        pack_tile_queries(rows, head_dim, this->scale(), tile_queries(head, row));
      }
    }
  }

  /// Four query rows after four. Sums of the next four are made before the weights of these, and of
  /// values added after them, so that neither waits for tiles to be stored.
  void compute_heads(const Found& now, const Tile& tile, Ahead<kKv>& k_ahead, Ahead<kKv>& v_ahead) {
    const tiles::DecodeLayout& layout = run_.layout;
    const AttentionProblem& problem = run_.problem();
    const ForwardInputs& in = run_.call.in;
    const auto bytes_apart = [&](const TensorView& view) {
      return now.spaced ? view.stride_seqlen * static_cast<std::int64_t>(sizeof(Element<kKv>)) : 0;
    };
    auto* const copied = reinterpret_cast<std::byte*>(scratch_ + layout.tile_rows);
    auto* const sums = reinterpret_cast<std::int32_t*>(scratch_ + layout.tile_sums);
    auto* const value_sums = reinterpret_cast<std::int32_t*>(scratch_ + layout.tile_values);
    const std::int64_t blocks = base::div_up(rows_, 4);
    const std::int64_t units = (last_head_ - first_head_) * blocks;
    bool whole[tiles::kDecodeRows / 4];  // of each four rows: on tiles
    for (std::int64_t i = 0; i < blocks; ++i) {
      RowBlock block;
      this->find_seen(4 * i, tile, block.seen);
      whole[i] = fits_tiles() && tile.keys == kTile && sees_all<4>(tile, block);
    }
    const auto head_of = [&](std::int64_t unit) { return first_head_ + unit / blocks; };
    // only the first four rows of a head prefetch
    const auto keys_of = [&](std::int64_t unit) {
      return this->keys_of(head_of(unit), now, unit % blocks == 0 ? &k_ahead : nullptr);
    };
    const auto sums_of = [&](std::int64_t unit) {
      return sums + unit % 2 * kTile * kQueryColumns<kKv>;
    };
    const auto start = [&](std::int64_t unit) {
      if (unit < units && whole[unit % blocks]) {
        const Rows<kKv> keys = keys_of(unit);
        sums_on_tiles<kKv, Machine>(
            rows_for_tiles<kKv>(keys, bytes_apart(in.k), problem.head_dim, copied),
            tile_queries(head_of(unit), unit % blocks * 4), problem.head_dim, keys, sums_of(unit));
      }
    };
    TileWeights weights{.tiles = reinterpret_cast<std::uint32_t*>(scratch_ + layout.tile_weights)};
    float* waiting = nullptr;  // O that value_sums belong to
    const auto finish = [&] {
      if (waiting != nullptr) {
        add_sums<kKv>(value_sums, weights.unit, problem.head_dim_v, layout.columns, waiting);
        waiting = nullptr;
      }
    };
    start(0);
    for (std::int64_t unit = 0; unit < units; ++unit) {
      start(unit + 1);
      finish();
      const std::int64_t head = head_of(unit);
      const std::int64_t row = unit % blocks * 4;
      const Rows<kKv> values = this->values_of(head, now, row == 0 ? &v_ahead : nullptr);
      const Tile mine = this->tile_of(head, tile);
      if (!whole[row / 4]) {
        compute_on_vectors(head, row, keys_of(unit), values, mine);
        continue;
      }
      const RowBlock block = this->block_at(head, row);
      scores_of_sums<kKv>(sums_of(unit), tile_queries(head, row).factors, block.s);
      weights_of_scores<kKv>(mine, block, layout.columns, careful_, values, block.s, weights);
      TileRows rows = {copied,
                       problem.head_dim_v * static_cast<std::int64_t>(sizeof(Element<kKv>))};
      if (careful_) {
        copy_finite(values, block, copied);
      } else {
        rows = rows_for_tiles<kKv>(values, bytes_apart(in.v), problem.head_dim_v, copied);
      }
      values_on_tiles<kKv, Machine>(rows, weights, problem.head_dim_v, values, value_sums);
      waiting = block.o;
      for (std::int64_t r = 0; kKv == DType::int8 && r < 4 && !weights.held; ++r) {
        if (weights.unit[r] == 0) {
          in_natural_order(block.o + r * layout.columns, 1, [&](float* o) {
            add_values<kKv, 1>(values, 0, kTile, block.s + r * kTile, 1, problem.head_dim_v,
                               layout.columns, o);
          });
        }
      }
    }
    finish();
  }

  /// Four rows on vectors.
  void compute_on_vectors(std::int64_t head, std::int64_t row, const Rows<kKv>& keys,
                          const Rows<kKv>& values, const Tile& tile) {
    const tiles::DecodeLayout& layout = run_.layout;
    const AttentionProblem& problem = run_.problem();
    if (const std::uint64_t bit = std::uint64_t{1} << (head - first_head_);
        kKv != DType::int8 && fits_tiles() && (packed_ & bit) == 0) {
      this->pack_queries(head);
      packed_ |= bit;
    }
    const RowBlock block = this->block_of(head, row, tile);
    if (!(kKv == DType::int8 && fits_tiles())) {
      this->template compute_block<4>(keys, values, tile, block);
      return;
    }
    scores_tile<kKv, 4>(keys, tile, block, layout.depth, problem.head_dim);
    adjust_scores<4>(tile, block);
    softmax<4>(tile, block, layout.columns);
    in_natural_order(block.o, 4, [&](float* o) {
      RowBlock natural = block;
      natural.o = o;
      values_tile<kKv, 4>(values, tile, natural, problem.head_dim_v, layout.columns);
    });
  }

  /// Adds what `add` adds to `rows` rows of zeros to rows of O whose columns lie in quads.
  template <typename F>
  void in_natural_order(float* o, std::int64_t rows, const F& add) const {
    const std::int64_t columns = run_.layout.columns;
    alignas(64) float natural[4 * (256 + kStep)] = {};
    add(natural);
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      o[i / columns * columns + quad_position(i % columns)] += natural[i];
    }
  }

  /// kTile rows of values with zeros for what is not finite, which is added here.
  void copy_finite(const Rows<kKv>& values, const RowBlock& block, std::byte* to) const {
    const std::int64_t columns = run_.problem().head_dim_v;
    for (std::int64_t key = 0; key < kTile; ++key) {
      for (std::int64_t c = 0; c < columns; ++c) {
        std::uint16_t bits = values[key][c];
        if ((bits & 0x7f80u) == 0x7f80u) {
          const float value = bf16_to_f32(bits);
          for (std::int64_t r = 0; r < 4; ++r) {
            block.o[r * run_.layout.columns + pair_position(c)] += block.s[r * kTile + key] * value;
          }
          bits = 0;
        }
        std::memcpy(to + (key * columns + c) * 2, &bits, 2);
      }
    }
  }

  /// Whether all of O is.
  bool finite() const {
    const tiles::DecodeLayout& layout = run_.layout;
    const D d;
    V zero = hn::Zero(d);  // or NaN
    for (std::int64_t head = first_head_; head < last_head_; ++head) {
      const float* const o = this->of_head(head) + layout.o;
      for (std::int64_t i = 0; i < rows_ * layout.columns; i += kLanes) {
        zero = hn::MulAdd(hn::Load(d, o + i), hn::Zero(d), zero);
      }
    }
    return hn::AllTrue(d, hn::Eq(zero, hn::Zero(d)));
  }

  std::uint64_t packed_ = 0;  // a bit a head: queries for vectors beside tiles
  bool careful_ = false;      // values that are not finite are kept from tiles
};

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::decode_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
