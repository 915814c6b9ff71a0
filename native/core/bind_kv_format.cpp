// SPDX-License-Identifier: Apache-2.0
// The formats and their predicates, as Python sees them.
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "kv_format.h"

namespace nb = nanobind;

namespace semkv {

void bind_kv_format(nb::module_& m) {
  nb::enum_<EngineKVFormat> formats(m, "EngineKVFormat", nb::is_arithmetic(),
                                    "The KV-cache formats; the name is the layout.");
  for (const FormatFacts& f : kFormats) formats.value(f.name.data(), f.format);

  const auto predicate = [&m](const char* name, bool FormatFacts::* fact) {
    m.def(name, [fact](EngineKVFormat format) { return facts(format).*fact; }, nb::arg("format"));
  };
  const auto shaped = [&m](const char* name, Structure structure) {
    m.def(name, [structure](EngineKVFormat format) { return facts(format).structure == structure; }, nb::arg("format"));
  };
  shaped("is_cross_layer", Structure::cross_layer);
  shaped("is_layer_list", Structure::layer_list);
  shaped("is_kv_list", Structure::kv_list);
  predicate("is_mla", &FormatFacts::mla);
  predicate("is_hnd", &FormatFacts::hnd);
  predicate("is_two_major", &FormatFacts::two_major);
  predicate("is_pbs_fused", &FormatFacts::pbs_fused);
  predicate("is_fused_packed", &FormatFacts::fused_packed);
  predicate("is_kv_second_tuple", &FormatFacts::kv_second_tuple);
  predicate("is_single_kv", &FormatFacts::single_kv);
  predicate("is_opaque", &FormatFacts::opaque);
  predicate("is_nz", &FormatFacts::nz);
  predicate("is_deprecated", &FormatFacts::deprecated);
  m.def("kv_size", [](EngineKVFormat format) { return static_cast<int>(facts(format).kv_size); }, nb::arg("format"));
  m.def("all_formats", [] {
    std::vector<EngineKVFormat> all;
    for (const FormatFacts& f : kFormats) all.push_back(f.format);
    return all;
  });
}

}  // namespace semkv
