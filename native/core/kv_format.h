// SPDX-License-Identifier: Apache-2.0
// Which KV-cache formats exist, and what is fixed about each. The only authority: the Python side is pinned to it by
// test.
//
// A name reads from the outside in. `A_X_B`: a list of A entries, each a B. The rest are the axes of one tensor: NL
// layers, TWO keys and values, NB blocks, BS tokens of a block, NBBS both in one axis, NH heads, HS head size, CS a
// head's keys then values, NP planes, ONE a singleton, BSV/BSS a block's values then its scales, NZ head size in pieces
// of C0 = 16 elements, PAGE an opaque page, whose declared axes are BS, NH and HS in an order that is the engine's own
// business.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace semkv {

enum class EngineKVFormat : std::uint8_t {
  NB_NL_TWO_BS_NH_HS = 0,
  NL_X_TWO_NB_BS_NH_HS = 1,
  NL_X_NB_TWO_BS_NH_HS = 2,
  NL_X_NB_BS_HS = 3,
  TWO_X_NL_X_NBBS_NH_HS = 4,
  NL_X_NBBS_ONE_HS = 5,
  NL_X_TWO_NB_NH_BS_HS = 6,
  NL_X_NB_TWO_NH_BS_HS = 7,
  NB_NL_TWO_NH_BS_HS = 8,
  TWO_X_NL_X_NB_BS_NH_HS = 9,
  NL_X_NB_NH_BS_TWO_HS = 10,
  NL_X_NB_BS_NH_TWO_HS = 11,
  NL_X_NB_NH_BS_CS = 12,
  NL_X_NB_BS_NH_CS = 13,
  NL_X_NB_BSV_BSS = 14,
  NL_X_TWO_NB_NH_ONE_BS_HS = 15,
  NL_X_TWO_X_NB_BS_NH_HS = 16,
  NL_X_NP_X_NB_BS_ONE_HS = 17,
  NL_X_NB_BS_NH_HS = 18,
  // Beyond the formats that other projects number.
  NL_X_TWO_X_NB_NZ_BS_C0 = 19,
  NL_X_NB_PAGE = 20,
  NL_X_TWO_NB_PAGE = 21,
};

enum class Structure : std::uint8_t { cross_layer, layer_list, kv_list };

struct FormatFacts {
  EngineKVFormat format;
  std::string_view name;
  Structure structure;
  std::uint8_t kv_size;
  bool mla = false;
  bool hnd = false;
  bool two_major = false;
  bool pbs_fused = false;
  bool fused_packed = false;
  bool kv_second_tuple = false;
  bool single_kv = false;
  bool opaque = false;
  bool nz = false;
  bool deprecated = false;
};

namespace detail {
using enum EngineKVFormat;
using enum Structure;
}  // namespace detail

// In the order of the enum's values.
inline constexpr std::array kFormats = {
    FormatFacts{.format = detail::NB_NL_TWO_BS_NH_HS,
                .name = "NB_NL_TWO_BS_NH_HS",
                .structure = detail::cross_layer,
                .kv_size = 2},
    FormatFacts{.format = detail::NL_X_TWO_NB_BS_NH_HS,
                .name = "NL_X_TWO_NB_BS_NH_HS",
                .structure = detail::layer_list,
                .kv_size = 2,
                .two_major = true},
    FormatFacts{.format = detail::NL_X_NB_TWO_BS_NH_HS,
                .name = "NL_X_NB_TWO_BS_NH_HS",
                .structure = detail::layer_list,
                .kv_size = 2},
    FormatFacts{.format = detail::NL_X_NB_BS_HS,
                .name = "NL_X_NB_BS_HS",
                .structure = detail::layer_list,
                .kv_size = 1,
                .mla = true},
    FormatFacts{.format = detail::TWO_X_NL_X_NBBS_NH_HS,
                .name = "TWO_X_NL_X_NBBS_NH_HS",
                .structure = detail::kv_list,
                .kv_size = 2,
                .pbs_fused = true},
    FormatFacts{.format = detail::NL_X_NBBS_ONE_HS,
                .name = "NL_X_NBBS_ONE_HS",
                .structure = detail::layer_list,
                .kv_size = 1,
                .mla = true,
                .pbs_fused = true},
    FormatFacts{.format = detail::NL_X_TWO_NB_NH_BS_HS,
                .name = "NL_X_TWO_NB_NH_BS_HS",
                .structure = detail::layer_list,
                .kv_size = 2,
                .hnd = true,
                .two_major = true},
    FormatFacts{.format = detail::NL_X_NB_TWO_NH_BS_HS,
                .name = "NL_X_NB_TWO_NH_BS_HS",
                .structure = detail::layer_list,
                .kv_size = 2,
                .hnd = true},
    FormatFacts{.format = detail::NB_NL_TWO_NH_BS_HS,
                .name = "NB_NL_TWO_NH_BS_HS",
                .structure = detail::cross_layer,
                .kv_size = 2,
                .hnd = true},
    FormatFacts{.format = detail::TWO_X_NL_X_NB_BS_NH_HS,
                .name = "TWO_X_NL_X_NB_BS_NH_HS",
                .structure = detail::kv_list,
                .kv_size = 2},
    FormatFacts{.format = detail::NL_X_NB_NH_BS_TWO_HS,
                .name = "NL_X_NB_NH_BS_TWO_HS",
                .structure = detail::layer_list,
                .kv_size = 1,
                .hnd = true,
                .fused_packed = true,
                .deprecated = true},
    FormatFacts{.format = detail::NL_X_NB_BS_NH_TWO_HS,
                .name = "NL_X_NB_BS_NH_TWO_HS",
                .structure = detail::layer_list,
                .kv_size = 1,
                .fused_packed = true,
                .deprecated = true},
    FormatFacts{.format = detail::NL_X_NB_NH_BS_CS,
                .name = "NL_X_NB_NH_BS_CS",
                .structure = detail::layer_list,
                .kv_size = 1,
                .hnd = true,
                .fused_packed = true},
    FormatFacts{.format = detail::NL_X_NB_BS_NH_CS,
                .name = "NL_X_NB_BS_NH_CS",
                .structure = detail::layer_list,
                .kv_size = 1,
                .fused_packed = true},
    FormatFacts{.format = detail::NL_X_NB_BSV_BSS,
                .name = "NL_X_NB_BSV_BSS",
                .structure = detail::layer_list,
                .kv_size = 1,
                .mla = true},
    FormatFacts{.format = detail::NL_X_TWO_NB_NH_ONE_BS_HS,
                .name = "NL_X_TWO_NB_NH_ONE_BS_HS",
                .structure = detail::layer_list,
                .kv_size = 2,
                .hnd = true,
                .two_major = true},
    FormatFacts{.format = detail::NL_X_TWO_X_NB_BS_NH_HS,
                .name = "NL_X_TWO_X_NB_BS_NH_HS",
                .structure = detail::layer_list,
                .kv_size = 2,
                .kv_second_tuple = true},
    FormatFacts{.format = detail::NL_X_NP_X_NB_BS_ONE_HS,
                .name = "NL_X_NP_X_NB_BS_ONE_HS",
                .structure = detail::layer_list,
                .kv_size = 1,
                .mla = true,
                .kv_second_tuple = true},
    FormatFacts{.format = detail::NL_X_NB_BS_NH_HS,
                .name = "NL_X_NB_BS_NH_HS",
                .structure = detail::layer_list,
                .kv_size = 1,
                .single_kv = true},
    FormatFacts{.format = detail::NL_X_TWO_X_NB_NZ_BS_C0,
                .name = "NL_X_TWO_X_NB_NZ_BS_C0",
                .structure = detail::layer_list,
                .kv_size = 2,
                .kv_second_tuple = true,
                .nz = true},
    FormatFacts{.format = detail::NL_X_NB_PAGE,
                .name = "NL_X_NB_PAGE",
                .structure = detail::layer_list,
                .kv_size = 1,
                .fused_packed = true,
                .opaque = true},
    FormatFacts{.format = detail::NL_X_TWO_NB_PAGE,
                .name = "NL_X_TWO_NB_PAGE",
                .structure = detail::layer_list,
                .kv_size = 2,
                .two_major = true,
                .opaque = true},
};

constexpr const FormatFacts& facts(EngineKVFormat format) { return kFormats[static_cast<std::size_t>(format)]; }

namespace detail {
constexpr bool in_order() {
  for (std::size_t i = 0; i < kFormats.size(); ++i) {
    if (static_cast<std::size_t>(kFormats[i].format) != i) return false;
  }
  return true;
}
static_assert(in_order(), "kFormats must list the formats by value");
}  // namespace detail

}  // namespace semkv
