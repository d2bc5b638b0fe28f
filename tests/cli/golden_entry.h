// One entry of golden.json as the command line sees it: its inputs become flags.
#pragma once

#include <map>
#include <string>

#include "support/golden.h"

namespace rafter::test {

using golden::Json;

/// Flags by name; a flag without a value has "".
using Flags = std::map<std::string, std::string>;

/// The document of `rafter VERB... FLAGS --format json`. Ends the test (std::runtime_error) when
/// the tool does not answer with one; exit code 1 (it does not fit) still carries a document.
const Json& ask(const std::string& verb, const Flags& flags);

class Entry : public golden::EntryFields {
 public:
  using EntryFields::EntryFields;

  /// An input of nested lists as the flag takes it: [[1, 2], [3, 5]] is "1,2/3,5".
  std::string blocks(const char* name) const;

  static std::string dtype_of_bytes(double bytes);

  /// --convention with each parameter that the entry states, and its device.
  Flags counting() const;
  Flags attention() const;
  Flags decode() const;
  Flags gemm() const;
  Flags model() const;
  Flags memory() const;
  Flags tiling() const;

 private:
  std::string dtype() const;
  void copy(Flags& flags, const char* flag, const char* input_name) const;
};

}  // namespace rafter::test
