#include "module.h"

NB_MODULE(_core, m) {
  m.doc() = "The compiled half of rafter; the package's functions are its interface.";
  rafter::python::bind_attend(m);
  rafter::python::bind_attention(m);
  rafter::python::bind_roofline(m);
  rafter::python::bind_transformer(m);
}
