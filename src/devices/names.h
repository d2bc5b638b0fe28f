// Names of figure kinds, for reading and writing.
#pragma once

#include <array>
#include <utility>

#include "rafter/device.h"

namespace rafter::devices {

inline constexpr std::array<std::pair<FigureKind, const char*>, 4> kFigureKinds = {{
    {FigureKind::spec, "spec"},
    {FigureKind::measured, "measured"},
    {FigureKind::derived, "derived"},
    {FigureKind::assumed, "assumed"},
}};

}  // namespace rafter::devices
