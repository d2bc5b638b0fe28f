// What the operating system and the processor say about this machine.
#pragma once

#include <string>

namespace rafter::measure {

std::string cpu_model();         // "AMD EPYC 7J13"
std::string instruction_sets();  // those that matter here, "avx2 fma f16c"
std::string operating_system();  // "Linux 6.1.0"
std::string date_utc();          // "2026-11-29T17:00:00Z"
double memory_total_bytes();     // 0 when unknown
double memory_available_bytes();

}  // namespace rafter::measure
