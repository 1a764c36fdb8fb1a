# hybrid_moe_add_cuda(TARGET): the CUDA part. Host code always; the kernels, compiled by nvcc and embedded as bytes, where
# HYBRID_MOE_CUDA allows and nvcc works. No CUDA language of CMake's, no CUDA library: nothing is linked.
#
# nvcc runs while CMake configures: only then can AUTO go on without kernels when it fails.
set(HYBRID_MOE_CUDA "AUTO" CACHE STRING "CUDA kernels: AUTO (when nvcc works; never when cross-compiling), ON (or stop), OFF")
set_property(CACHE HYBRID_MOE_CUDA PROPERTY STRINGS AUTO ON OFF)
set(HYBRID_MOE_CUDA_SOURCES "${CMAKE_CURRENT_LIST_DIR}")

# Code for these, as far as nvcc has them; others of the same generation run them, later generations compile the PTX.
set(HYBRID_MOE_CUDA_ARCHITECTURES 75 80 86 89 90 120 CACHE STRING "compute capabilities to compile the CUDA kernels for")

# Runs nvcc with the given arguments; sets nvcc_output, and nvcc_error to empty or what went wrong.
macro(hybrid_moe_nvcc)
  execute_process(COMMAND "${HYBRID_MOE_NVCC}" ${ARGN} RESULT_VARIABLE nvcc_failed OUTPUT_VARIABLE nvcc_output
                  ERROR_VARIABLE nvcc_error TIMEOUT 300)
  if(nvcc_failed)
    set(nvcc_error "${HYBRID_MOE_NVCC} failed (${nvcc_failed}): ${nvcc_error}")
  else()
    set(nvcc_error "")
  endif()
endmacro()

# What to compile for. Sets in the caller: nvcc_error (empty: decided), toolkit, names, code (nvcc's options), lowest.
function(hybrid_moe_choose_architectures)
  set(names "")
  set(code "")
  set(taken "")
  hybrid_moe_nvcc(--version)
  if(nvcc_error STREQUAL "" AND NOT nvcc_output MATCHES "release ([0-9]+\\.[0-9]+)")
    set(nvcc_error "${HYBRID_MOE_NVCC} --version names no release")
  endif()
  set(toolkit "${CMAKE_MATCH_1}" PARENT_SCOPE)
  if(nvcc_error STREQUAL "")
    hybrid_moe_nvcc(--list-gpu-code)
  endif()
  if(nvcc_error STREQUAL "")
    foreach(architecture ${HYBRID_MOE_CUDA_ARCHITECTURES})
      if(nvcc_output MATCHES "sm_${architecture}[^0-9]")
        list(APPEND taken ${architecture})
        list(APPEND names sm_${architecture})
        list(APPEND code -gencode arch=compute_${architecture},code=sm_${architecture})
      endif()
    endforeach()
    if(taken)
      list(GET taken 0 lowest)
      list(GET taken -1 newest)
      set(ptx_of ${lowest} ${newest})
      list(REMOVE_DUPLICATES ptx_of)
      foreach(architecture ${ptx_of})
        list(APPEND names compute_${architecture})
        list(APPEND code -gencode arch=compute_${architecture},code=compute_${architecture})
      endforeach()
    else()
      string(JOIN " " wanted_names ${HYBRID_MOE_CUDA_ARCHITECTURES})
      set(nvcc_error "${HYBRID_MOE_NVCC} has none of the architectures ${wanted_names}")
    endif()
  endif()
  string(JOIN " " names ${names})
  foreach(result nvcc_error names code lowest)
    set(${result} "${${result}}" PARENT_SCOPE)
  endforeach()
endfunction()

# Compiles fp8_expand.cu into FOLDER, unless that is done: fp8_expand.fatbin and fp8_expand.ptx. Sets in the caller: cuda_error
# (empty: done), cuda_names, cuda_toolkit.
function(hybrid_moe_compile_kernels folder)
  set(source "${HYBRID_MOE_CUDA_SOURCES}/fp8_expand.cu")
  set(options -std=c++17 -O3 -fmad=false --no-compress -allow-unsupported-compiler)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_CROSSCOMPILING)
    list(APPEND options -ccbin "${CMAKE_CXX_COMPILER}")
  endif()
  hybrid_moe_choose_architectures()
  file(SHA256 "${source}" source_hash)
  file(SHA256 "${HYBRID_MOE_CUDA_SOURCES}/fp8_expand_body.h" body_hash)
  set(stamp "${HYBRID_MOE_NVCC};${toolkit};${options};${code};${source_hash};${body_hash}")
  set(done "")
  if(EXISTS "${folder}/stamp" AND EXISTS "${folder}/fp8_expand.fatbin" AND EXISTS "${folder}/fp8_expand.ptx")
    file(READ "${folder}/stamp" done)
  endif()
  if(nvcc_error STREQUAL "" AND NOT done STREQUAL stamp)
    file(MAKE_DIRECTORY "${folder}")
    hybrid_moe_nvcc(${options} -fatbin ${code} -o "${folder}/fp8_expand.fatbin" "${source}")
    if(nvcc_error STREQUAL "")
      hybrid_moe_nvcc(${options} -ptx -arch=compute_${lowest} -o "${folder}/fp8_expand.ptx" "${source}")
    endif()
    if(nvcc_error STREQUAL "")
      file(WRITE "${folder}/stamp" "${stamp}")
    endif()
  endif()
  set(cuda_error "${nvcc_error}" PARENT_SCOPE)
  set(cuda_names "${names}" PARENT_SCOPE)
  set(cuda_toolkit "${toolkit}" PARENT_SCOPE)
endfunction()

# The bytes of FILE as a C initialiser list.
function(hybrid_moe_bytes file result)
  file(READ "${file}" hex HEX)
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
  set(${result} "${bytes}" PARENT_SCOPE)
endfunction()

# Sets cuda_error in the caller: empty when the kernels are in FOLDER, else why not.
macro(hybrid_moe_try_kernels folder)
  find_program(HYBRID_MOE_NVCC nvcc HINTS "$ENV{CUDA_PATH}/bin" "$ENV{CUDA_HOME}/bin" PATHS /usr/local/cuda/bin /opt/cuda/bin
               DOC "NVIDIA's CUDA compiler")
  if(HYBRID_MOE_NVCC)
    hybrid_moe_compile_kernels("${folder}")
  else()
    set(cuda_error "nvcc is not found")
  endif()
endmacro()

function(hybrid_moe_add_cuda target)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/cuda-kernels")
  set(image "nullptr, nullptr, \"\", \"\"")
  set(arrays "")
  string(TOUPPER "${HYBRID_MOE_CUDA}" wanted)
  if(NOT wanted MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "HYBRID_MOE_CUDA=${HYBRID_MOE_CUDA}: must be AUTO, ON or OFF")
  elseif(wanted STREQUAL "OFF")
    message(STATUS "CUDA kernels: off")
  elseif(wanted STREQUAL "AUTO" AND CMAKE_CROSSCOMPILING)
    message(STATUS "CUDA kernels: off, because this is a cross-compilation (HYBRID_MOE_CUDA=ON builds them)")
  else()
    hybrid_moe_try_kernels("${folder}")
    if(cuda_error STREQUAL "")
      message(STATUS "CUDA kernels: ${cuda_names} (nvcc ${cuda_toolkit})")
      hybrid_moe_bytes("${folder}/fp8_expand.fatbin" fatbin)
      # The text keeps to what the first PTX for sm_75 has, but nvcc names its own version, which older drivers refuse.
      file(READ "${folder}/fp8_expand.ptx" ptx_text)
      if(ptx_text MATCHES "\\.target sm_75")
        string(REGEX REPLACE "\n\\.version [0-9.]+" "\n.version 6.3" ptx_text "${ptx_text}")
      endif()
      file(WRITE "${folder}/fp8_expand_old.ptx" "${ptx_text}")
      hybrid_moe_bytes("${folder}/fp8_expand_old.ptx" ptx)
      set(arrays "alignas(16) const unsigned char fatbin[] = {${fatbin}};\nconst unsigned char ptx[] = {${ptx}0};\n")
      set(image "fatbin, reinterpret_cast<const char *>(ptx), \"${cuda_names}\", \"${cuda_toolkit}\"")
    elseif(wanted STREQUAL "ON")
      message(FATAL_ERROR "HYBRID_MOE_CUDA=ON: ${cuda_error}")
    elseif(HYBRID_MOE_NVCC)
      message(WARNING "CUDA kernels: none. ${cuda_error}")
    else()
      message(STATUS "CUDA kernels: none, ${cuda_error}")
    endif()
  endif()
  file(CONFIGURE OUTPUT "${folder}/kernel_image.cpp" CONTENT "// Generated by cuda.cmake.
#include \"cuda/kernel_image.h\"
namespace {
${arrays}}
const hybrid_moe::KernelImage & hybrid_moe::kernel_image() {
    static const KernelImage image = {${image}};
    return image;
}
" @ONLY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
               "${HYBRID_MOE_CUDA_SOURCES}/fp8_expand.cu" "${HYBRID_MOE_CUDA_SOURCES}/fp8_expand_body.h")
  target_sources(${target} PRIVATE "${folder}/kernel_image.cpp" "${HYBRID_MOE_CUDA_SOURCES}/cuda_driver.cpp"
                 "${HYBRID_MOE_CUDA_SOURCES}/cuda_device.cpp")
endfunction()
