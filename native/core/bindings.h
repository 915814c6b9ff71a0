// SPDX-License-Identifier: Apache-2.0
// What each binding file offers to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace semkv {

void bind_block_copier(nanobind::module_& m);
void bind_file_read(nanobind::module_& m);
void bind_hash_texts(nanobind::module_& m);
void bind_kv_format(nanobind::module_& m);
void bind_row_copier(nanobind::module_& m);
void bind_tokens(nanobind::module_& m);

}  // namespace semkv
