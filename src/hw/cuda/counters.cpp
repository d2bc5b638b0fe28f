#include "hw/cuda/counters.h"

#include <cuda_runtime_api.h>
#include <cupti_profiler_host.h>
#include <cupti_profiler_target.h>
#include <cupti_range_profiler.h>
#include <cupti_target.h>
#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "hw/cuda/launch.h"
#include "hw/cuda/loaded_library.h"

namespace rafter::cuda {
namespace {

/// GH100's names; one pass holds both.
const char* const kMetrics[] = {"dram__bytes_read.sum", "dram__bytes_write.sum"};
constexpr std::size_t kMetricCount = std::size(kMetrics);

/// The functions used, found by name.
struct Library {
  decltype(&cuptiGetResultString) result_string = nullptr;
  decltype(&cuptiProfilerInitialize) initialize = nullptr;
  decltype(&cuptiDeviceGetChipName) chip_name = nullptr;
  decltype(&cuptiProfilerHostInitialize) host_initialize = nullptr;
  decltype(&cuptiProfilerHostConfigAddMetrics) add_metrics = nullptr;
  decltype(&cuptiProfilerHostGetConfigImageSize) config_size = nullptr;
  decltype(&cuptiProfilerHostGetConfigImage) config_image = nullptr;
  decltype(&cuptiProfilerHostGetNumOfPasses) passes = nullptr;
  decltype(&cuptiProfilerHostEvaluateToGpuValues) evaluate = nullptr;
  decltype(&cuptiRangeProfilerEnable) enable = nullptr;
  decltype(&cuptiRangeProfilerDisable) disable = nullptr;
  decltype(&cuptiRangeProfilerGetCounterDataSize) data_size = nullptr;
  decltype(&cuptiRangeProfilerCounterDataImageInitialize) data_initialize = nullptr;
  decltype(&cuptiRangeProfilerSetConfig) set_config = nullptr;
  decltype(&cuptiRangeProfilerStart) start = nullptr;
  decltype(&cuptiRangeProfilerPushRange) push = nullptr;
  decltype(&cuptiRangeProfilerPopRange) pop = nullptr;
  decltype(&cuptiRangeProfilerStop) stop = nullptr;
  decltype(&cuptiRangeProfilerDecodeData) decode = nullptr;
  std::string missing;  // why it cannot be used
};

Library open_library() {
  Library library;
  LoadedLibrary opened("CUPTI", {"libcupti.so.13", "/usr/local/cuda/lib64/libcupti.so.13",
                                 "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so.13"});
  opened.find("cuptiGetResultString", library.result_string);
  opened.find("cuptiProfilerInitialize", library.initialize);
  opened.find("cuptiDeviceGetChipName", library.chip_name);
  opened.find("cuptiProfilerHostInitialize", library.host_initialize);
  opened.find("cuptiProfilerHostConfigAddMetrics", library.add_metrics);
  opened.find("cuptiProfilerHostGetConfigImageSize", library.config_size);
  opened.find("cuptiProfilerHostGetConfigImage", library.config_image);
  opened.find("cuptiProfilerHostGetNumOfPasses", library.passes);
  opened.find("cuptiProfilerHostEvaluateToGpuValues", library.evaluate);
  opened.find("cuptiRangeProfilerEnable", library.enable);
  opened.find("cuptiRangeProfilerDisable", library.disable);
  opened.find("cuptiRangeProfilerGetCounterDataSize", library.data_size);
  opened.find("cuptiRangeProfilerCounterDataImageInitialize", library.data_initialize);
  opened.find("cuptiRangeProfilerSetConfig", library.set_config);
  opened.find("cuptiRangeProfilerStart", library.start);
  opened.find("cuptiRangeProfilerPushRange", library.push);
  opened.find("cuptiRangeProfilerPopRange", library.pop);
  opened.find("cuptiRangeProfilerStop", library.stop);
  opened.find("cuptiRangeProfilerDecodeData", library.decode);
  library.missing = opened.missing();
  return library;
}

const Library& library() {
  static const Library opened = open_library();
  return opened;
}

Status status_of_cupti(CUptiResult code, const char* step) {
  if (code == CUPTI_SUCCESS) {
    return Status::ok();
  }
  if (code == CUPTI_ERROR_INSUFFICIENT_PRIVILEGES) {
    return Status::device_error(
        "counters", "this user may not read them",
        "root, or the driver's option NVreg_RestrictProfilingToAdminUsers=0");
  }
  const char* text = nullptr;
  (void)library().result_string(code, &text);
  return Status::device_error(
      "counters", fmt::format("CUPTI, {}: {}", step, text != nullptr ? text : "unknown error"));
}

/// A parameter block with its size, everything else zero.
#define RAFTER_CUPTI_PARAMS(name, variable) \
  name##_Params variable{};                 \
  variable.structSize = name##_Params_STRUCT_SIZE

/// What is the same for every count on a chip.
struct Setup {
  CUpti_Profiler_Host_Object* host = nullptr;  // kept as long as the process lives
  std::vector<std::uint8_t> config;
  Status status;
};

Status fill(Setup& setup, int device) {
  const Library& cupti = library();
  RAFTER_CUPTI_PARAMS(CUpti_Profiler_Initialize, initialize);
  if (Status s = status_of_cupti(cupti.initialize(&initialize), "initialisation"); !s) {
    return s;
  }
  RAFTER_CUPTI_PARAMS(CUpti_Device_GetChipName, chip);
  chip.deviceIndex = static_cast<std::size_t>(device);
  if (Status s = status_of_cupti(cupti.chip_name(&chip), "name of the chip"); !s) {
    return s;
  }
  RAFTER_CUPTI_PARAMS(CUpti_Profiler_Host_Initialize, host);
  host.profilerType = CUPTI_PROFILER_TYPE_RANGE_PROFILER;
  host.pChipName = chip.pChipName;
  if (Status s = status_of_cupti(cupti.host_initialize(&host), "metrics of the chip"); !s) {
    return s;
  }
  setup.host = host.pHostObject;
  RAFTER_CUPTI_PARAMS(CUpti_Profiler_Host_ConfigAddMetrics, metrics);
  metrics.pHostObject = setup.host;
  metrics.ppMetricNames = const_cast<const char**>(kMetrics);
  metrics.numMetrics = kMetricCount;
  if (Status s = status_of_cupti(cupti.add_metrics(&metrics), "names of the metrics"); !s) {
    return s;
  }
  RAFTER_CUPTI_PARAMS(CUpti_Profiler_Host_GetConfigImageSize, size);
  size.pHostObject = setup.host;
  if (Status s = status_of_cupti(cupti.config_size(&size), "configuration"); !s) {
    return s;
  }
  setup.config.resize(size.configImageSize);
  RAFTER_CUPTI_PARAMS(CUpti_Profiler_Host_GetConfigImage, image);
  image.pHostObject = setup.host;
  image.configImageSize = setup.config.size();
  image.pConfigImage = setup.config.data();
  if (Status s = status_of_cupti(cupti.config_image(&image), "configuration"); !s) {
    return s;
  }
  RAFTER_CUPTI_PARAMS(CUpti_Profiler_Host_GetNumOfPasses, passes);
  passes.configImageSize = setup.config.size();
  passes.pConfigImage = setup.config.data();
  if (Status s = status_of_cupti(cupti.passes(&passes), "number of passes"); !s) {
    return s;
  }
  return passes.numOfPasses == 1
             ? Status::ok()
             : Status::device_error("counters",
                                    fmt::format("{} passes for both counters", passes.numOfPasses),
                                    "a chip that counts them in one");
}

/// The current context, from the driver that the runtime has opened.
Result<CUcontext> current_context() {
  using GetCurrent = CUresult (*)(CUcontext*);
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kSince = 12000;
  CUcontext context = nullptr;
  if (Status s = status_of(cudaFree(nullptr), "context of the device"); !s) {  // there is one now
    return s;
  }
  if (cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, kSince, cudaEnableDefault,
                                       &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess ||
      reinterpret_cast<GetCurrent>(function)(&context) != CUDA_SUCCESS || context == nullptr) {
    return Status::device_error("counters", "the driver has no current context");
  }
  return context;
}

/// The profiler of a context, switched off with the object.
class Profiler {
 public:
  Profiler() = default;
  ~Profiler() {
    if (object_ != nullptr) {
      RAFTER_CUPTI_PARAMS(CUpti_RangeProfiler_Disable, disable);
      disable.pRangeProfilerObject = object_;
      (void)library().disable(&disable);
    }
  }
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  Status enable(CUcontext context) {
    RAFTER_CUPTI_PARAMS(CUpti_RangeProfiler_Enable, enable);
    enable.ctx = context;
    const Status status = status_of_cupti(library().enable(&enable), "profiler");
    object_ = status ? enable.pRangeProfilerObject : nullptr;
    return status;
  }

  /// Room for one range.
  Status configure(Setup& setup) {
    RAFTER_CUPTI_PARAMS(CUpti_RangeProfiler_GetCounterDataSize, size);
    size.pRangeProfilerObject = object_;
    size.pMetricNames = const_cast<const char**>(kMetrics);
    size.numMetrics = kMetricCount;
    size.maxNumOfRanges = 1;
    size.maxNumRangeTreeNodes = 1;
    if (Status s = status_of_cupti(library().data_size(&size), "room for counters"); !s) {
      return s;
    }
    data_.resize(size.counterDataSize);
    RAFTER_CUPTI_PARAMS(CUpti_RangeProfiler_CounterDataImage_Initialize, image);
    image.pRangeProfilerObject = object_;
    image.counterDataSize = data_.size();
    image.pCounterData = data_.data();
    if (Status s = status_of_cupti(library().data_initialize(&image), "room for counters"); !s) {
      return s;
    }
    RAFTER_CUPTI_PARAMS(CUpti_RangeProfiler_SetConfig, config);
    config.pRangeProfilerObject = object_;
    config.configSize = setup.config.size();
    config.pConfig = setup.config.data();
    config.counterDataImageSize = data_.size();
    config.pCounterDataImage = data_.data();
    config.range = CUPTI_UserRange;
    config.replayMode = CUPTI_UserReplay;
    config.maxRangesPerPass = 1;
    config.numNestingLevels = 1;
    config.minNestingLevel = 1;
    config.passIndex = 0;
    config.targetNestingLevel = 1;
    return status_of_cupti(library().set_config(&config), "configuration");
  }

  /// The work between the start and the end of the one range. What was begun is ended, whatever
  /// fails in between.
  Status run(const std::function<Status()>& work) {
    RAFTER_CUPTI_PARAMS(CUpti_RangeProfiler_Start, start);
    start.pRangeProfilerObject = object_;
    if (Status s = status_of_cupti(library().start(&start), "start"); !s) {
      return s;
    }
    RAFTER_CUPTI_PARAMS(CUpti_RangeProfiler_PushRange, push);
    push.pRangeProfilerObject = object_;
    push.pRangeName = "work";
    Status status = status_of_cupti(library().push(&push), "start of the range");
    if (status) {
      status = work();
      if (Status s = status_of(cudaDeviceSynchronize(), "work between counters"); status) {
        status = s;
      }
      RAFTER_CUPTI_PARAMS(CUpti_RangeProfiler_PopRange, pop);
      pop.pRangeProfilerObject = object_;
      if (Status s = status_of_cupti(library().pop(&pop), "end of the range"); status) {
        status = s;
      }
    }
    RAFTER_CUPTI_PARAMS(CUpti_RangeProfiler_Stop, stop);
    stop.pRangeProfilerObject = object_;
    if (Status s = status_of_cupti(library().stop(&stop), "stop"); status) {
      status = s;
    }
    return status;
  }

  Result<DramBytes> read(const Setup& setup) {
    RAFTER_CUPTI_PARAMS(CUpti_RangeProfiler_DecodeData, decode);
    decode.pRangeProfilerObject = object_;
    if (Status s = status_of_cupti(library().decode(&decode), "decoding"); !s) {
      return s;
    }
    double values[kMetricCount] = {};
    RAFTER_CUPTI_PARAMS(CUpti_Profiler_Host_EvaluateToGpuValues, evaluate);
    evaluate.pHostObject = setup.host;
    evaluate.pCounterDataImage = data_.data();
    evaluate.counterDataImageSize = data_.size();
    evaluate.rangeIndex = 0;
    evaluate.ppMetricNames = const_cast<const char**>(kMetrics);
    evaluate.numMetrics = kMetricCount;
    evaluate.pMetricValues = values;
    if (Status s = status_of_cupti(library().evaluate(&evaluate), "evaluation"); !s) {
      return s;
    }
    for (const double value : values) {
      if (!std::isfinite(value) || value < 0) {
        return Status::device_error("counters", fmt::format("a count of {}", value));
      }
    }
    return DramBytes{values[0], values[1]};
  }

 private:
  CUpti_RangeProfiler_Object* object_ = nullptr;
  std::vector<std::uint8_t> data_;
};

#undef RAFTER_CUPTI_PARAMS

}  // namespace

Result<DramBytes> count_dram_bytes(const std::function<Status()>& work) {
  if (!library().missing.empty()) {
    return Status::device_error("counters", library().missing);
  }
  int device = 0;
  if (Status s = status_of(cudaGetDevice(&device), "current device"); !s) {
    return s;
  }
  static std::mutex mutex;
  static auto* const setups = new std::map<int, std::unique_ptr<Setup>>;  // outlive the statics
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Setup>& setup = (*setups)[device];
  if (setup == nullptr) {
    setup = std::make_unique<Setup>();
    setup->status = fill(*setup, device);
  }
  if (!setup->status) {
    return setup->status;
  }
  const Result<CUcontext> context = current_context();
  if (!context) {
    return context.status();
  }
  Profiler profiler;
  if (Status s = profiler.enable(*context); !s) {
    return s;
  }
  if (Status s = profiler.configure(*setup); !s) {
    return s;
  }
  if (Status s = profiler.run(work); !s) {
    return s;
  }
  return profiler.read(*setup);
}

}  // namespace rafter::cuda
