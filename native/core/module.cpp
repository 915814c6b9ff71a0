// SPDX-License-Identifier: Apache-2.0
// The extension module semkv.native._core. Each source file beside this one registers its own functions here.
#include "bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "semkv's C++ core: KV layouts, block transfers, whole files, tokens and hashes of prompts";
  semkv::bind_block_copier(m);
  semkv::bind_file_read(m);
  semkv::bind_hash_texts(m);
  semkv::bind_kv_format(m);
  semkv::bind_row_copier(m);
  semkv::bind_tokens(m);
}
