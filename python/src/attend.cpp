// _core.attend, and the way past the reading of Python's arguments to a call that is known.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "calls.h"
#include "errors.h"
#include "inputs.h"
#include "known_calls.h"
#include "module.h"

namespace rafter::python {
namespace {

/// What Python knows each argument by; empty where only the package's own code gives it.
constexpr std::array<const char*, kArguments> kNames = {"q",
                                                        "k",
                                                        "v",
                                                        "cu_seqlens_q",
                                                        "cu_seqlens_kv",
                                                        "seqused_kv",
                                                        "page_table",
                                                        "k_scale",
                                                        "v_scale",
                                                        "tree_mask",
                                                        "bad_pages",
                                                        "causal",
                                                        "window",
                                                        "align",
                                                        "softmax_scale",
                                                        "softcap",
                                                        "pipeline",
                                                        "kernel",
                                                        "threads",
                                                        "splits",
                                                        "max_seqlen_q",
                                                        "max_seqlen_kv",
                                                        "return_lse",
                                                        "out",
                                                        "",
                                                        "",
                                                        "",
                                                        "stream"};

template <std::size_t kCount>
nb::tuple tuple_from(Arguments first) {
  nb::object tuple = nb::steal(PyTuple_New(kCount));
  for (std::size_t i = 0; i < kCount; ++i) {
    PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(i), nb::handle(first[i]).inc_ref().ptr());
  }
  return nb::borrow<nb::tuple>(tuple);
}

nb::object attend_anew(Arguments given) {
  const nb::tuple arrays = tuple_from<kArrayArguments>(given);
  const bool decode = given[kDecode] == Py_True, grad = given[kGrad] == Py_True;
  std::array<PyObject*, kMaxSeqlenQ - kCausal> options;
  std::copy_n(given + kCausal, options.size(), options.begin());
  if (decode && options[0] == Py_None) {  // new tokens see each other in order, or as a tree
    options[0] = given[kTreeMask] == Py_None ? Py_True : Py_False;
  }
  const auto return_lse = argument<bool>("return_lse", given[kReturnLse], "True or False");
  const auto heads_first = static_cast<HeadsFirst>(nb::cast<int>(nb::handle(given[kHeadsFirst])));
  const Inputs in(arrays, given[kStream], decode, grad, heads_first, grad);
  const DevicePlan plan =
      plan_of(in, Options(tuple_from<options.size()>(options.data())),
              max_lengths_of(given[kMaxSeqlenQ], given[kMaxSeqlenKv]), Pass::forward);
  const ForwardArguments arguments = in.forward_arguments();
  nb::object result = forward(plan, arguments, given[kOut], return_lse);
  remember_call(given, in, plan, arguments, return_lse);
  return result;
}

/// A known call's result; an invalid object where none is known.
nb::object attend_known(Arguments given) {
  if (given[kStream] != Py_None) {
    return {};
  }
  const std::optional<KnownCall> known = known_call(given);
  return known ? forward(*known->plan, known->arguments, given[kOut], known->return_lse)
               : nb::object();
}

/// What a function of Python's own convention returns for a call that may throw.
template <typename Call>
PyObject* returned(const Call& call) noexcept {
  try {
    return call().release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const nb::builtin_exception& error) {
    PyErr_SetString(
        error.type() == nb::exception_type::value_error ? PyExc_ValueError : PyExc_RuntimeError,
        error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* attend(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(kArguments)) {
    PyErr_Format(PyExc_TypeError, "attend takes %zu arguments, %zd given", std::size_t{kArguments},
                 count);
    return nullptr;
  }
  return returned([&] {
    nb::object known = attend_known(given);
    return known.is_valid() ? known : attend_anew(given);
  });
}

// ---- functions of the package that lead to attend

/// A function written in Python, and what it hands to attend: each of its parameters as the
/// argument of that name, and constants.
struct QuickFunction {
  nb::object function;
  std::string name, doc;  // what Python shows
  PyMethodDef definition{};
  std::vector<nb::object> parameters;  // names, interned
  std::vector<std::size_t> arguments;  // of the parameters
  std::ptrdiff_t required = 0;
  std::size_t positional = 0;
  std::array<nb::object, kArguments> defaults;

  /// The arguments of attend; false where Python's own reading must say what is wrong, or where a
  /// name is not the interned one.
  bool read(PyObject* const* given, std::size_t count, PyObject* names, PyObject** out) const {
    if (count > positional) {
      return false;
    }
    std::transform(defaults.begin(), defaults.end(), out,
                   [](const nb::object& value) { return value.ptr(); });
    for (std::size_t i = 0; i < count; ++i) {
      out[arguments[i]] = given[i];
    }
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_Size(names);
    for (Py_ssize_t i = 0; i < named; ++i) {
      const PyObject* const name = PyTuple_GetItem(names, i);
      std::size_t at = count;  // those before it are given by position
      while (at < parameters.size() && parameters[at].ptr() != name) {
        ++at;
      }
      if (at == parameters.size()) {
        return false;
      }
      out[arguments[at]] = given[count + static_cast<std::size_t>(i)];
    }
    return std::all_of(arguments.begin(), arguments.begin() + required,
                       [&](std::size_t at) { return out[at] != nullptr; });
  }
};

constexpr std::size_t kMostQuick = 2;
std::array<QuickFunction*, kMostQuick> quick_functions{};  // not freed, as what is kept of calls

/// Each has a C function of its own, so that `self` can be its module, as pickle wants it.
template <std::size_t kIndex>
PyObject* call_quick(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  const QuickFunction& quick = *quick_functions[kIndex];
  std::array<PyObject*, kArguments> arguments;
  const auto positional = static_cast<std::size_t>(count);
  if (quick.read(given, positional, names, arguments.data())) {
    PyObject* const result = returned([&] { return attend_known(arguments.data()); });
    if (result != nullptr || PyErr_Occurred() != nullptr) {
      return result;
    }
  }
  return PyObject_Vectorcall(quick.function.ptr(), given, positional, names);
}

using QuickCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
constexpr std::array<QuickCall, kMostQuick> kQuickCalls = {call_quick<0>, call_quick<1>};

std::size_t argument_named(const std::string& name) {
  return static_cast<std::size_t>(std::ranges::find(kNames, name) - kNames.begin());
}

/// The text by which Python shows the parameters of a function that is not its own.
std::string signature_of(const QuickFunction& quick) {
  std::string text = quick.name + "(";
  for (std::size_t i = 0; i < quick.parameters.size(); ++i) {
    text += i == 0 ? "" : ", ";
    text += i == quick.positional ? "*, " : "";
    text += nb::cast<std::string>(quick.parameters[i]);
    if (const nb::object& value = quick.defaults[quick.arguments[i]]; value.is_valid()) {
      text += "=" + nb::cast<std::string>(nb::repr(value));
    }
  }
  return text + ")\n--\n\n";
}

/// `function`, whose calls reach attend_known before Python reads their arguments. `constants` are
/// what the function gives to attend beside its own parameters, by the names in `renamed` where
/// these differ.
nb::object quick(const nb::object& module, const nb::object& function, const nb::dict& renamed,
                 bool decode) {
  const auto free = std::ranges::find(quick_functions, nullptr);
  if (free == quick_functions.end()) {
    return function;
  }
  auto* const made = new QuickFunction;
  made->function = function;
  const nb::object code = function.attr("__code__");
  const auto positional = nb::cast<std::size_t>(code.attr("co_argcount"));
  const auto all = positional + nb::cast<std::size_t>(code.attr("co_kwonlyargcount"));
  std::ranges::fill(made->defaults, nb::none());
  made->defaults[kDecode] = nb::bool_(decode);
  made->defaults[kGrad] = nb::bool_(false);
  made->defaults[kThreads] = made->defaults[kSplits] = made->defaults[kHeadsFirst] = nb::int_(0);
  const nb::object defaults = function.attr("__defaults__"),
                   keyword = function.attr("__kwdefaults__");
  const std::size_t optional = defaults.is_none() ? 0 : nb::len(defaults);
  for (std::size_t i = 0; i < all; ++i) {
    const nb::object name = code.attr("co_varnames")[i];
    const nb::object theirs = renamed.contains(name) ? nb::object(renamed[name]) : name;
    const std::size_t at = argument_named(nb::cast<std::string>(theirs));
    if (at == kArguments) {
      raise_invalid_value("function", name, "parameters of attend");
    }
    made->parameters.push_back(name);
    made->arguments.push_back(at);
    made->defaults[at] = i >= positional ? nb::object(keyword[name])
                         : i + optional < positional
                             ? nb::object()
                             : nb::object(defaults[i + optional - positional]);
  }
  made->positional = positional;
  made->required = static_cast<std::ptrdiff_t>(positional - optional);
  made->name = nb::cast<std::string>(function.attr("__name__"));
  made->doc = signature_of(*made) + nb::cast<std::string>(function.attr("__doc__"));
  const auto index = static_cast<std::size_t>(free - quick_functions.begin());
  made->definition = {made->name.c_str(),
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(kQuickCalls[index])),
                      METH_FASTCALL | METH_KEYWORDS, made->doc.c_str()};
  *free = made;
  return nb::steal(
      PyCFunction_NewEx(&made->definition, module.ptr(), module.attr("__name__").ptr()));
}

}  // namespace

void bind_attend(nb::module_& m) {
  static PyMethodDef definition = {
      "attend", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(attend)), METH_FASTCALL,
      "Attention of the arguments of known_calls.h, all by position."};
  m.attr("attend") = nb::steal(PyCFunction_NewEx(&definition, m.ptr(), m.attr("__name__").ptr()));
  m.def("quick", &quick, nb::arg("module"), nb::arg("function"), nb::arg("renamed"),
        nb::arg("decode"));
}

}  // namespace rafter::python
