# Sets HYBRID_MOE_GGML_INCLUDE to the ggml headers of the pinned llama-cpp-python source archive: given by
# HYBRID_MOE_LLAMA_SDIST, or fetched by name with pip. Only headers are unpacked; nothing of it is built here.
set(sdist_dir "${CMAKE_BINARY_DIR}/llama-sdist")
set(ggml_root "${sdist_dir}/llama_cpp_python-${HYBRID_MOE_LLAMA_VERSION}/vendor/llama.cpp/ggml")

if(NOT EXISTS "${ggml_root}/src/ggml-backend-impl.h")
  set(archive "${HYBRID_MOE_LLAMA_SDIST}")
  if(archive STREQUAL "")
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    message(STATUS "Fetching llama-cpp-python ${HYBRID_MOE_LLAMA_VERSION} for its ggml headers")
    # pip asks the package's own build back end for its name: the one at hand inside a wheel's isolated build, else pip's.
    foreach(isolation "--no-build-isolation" "")
      execute_process(
        COMMAND "${Python3_EXECUTABLE}" -m pip download --quiet --no-deps ${isolation}
                --no-binary llama-cpp-python --dest "${sdist_dir}" "llama-cpp-python==${HYBRID_MOE_LLAMA_VERSION}"
        RESULT_VARIABLE failed ERROR_VARIABLE reason)
      if(NOT failed)
        break()
      endif()
    endforeach()
    if(failed)
      string(STRIP "${reason}" reason)
      string(REGEX REPLACE ".*\n" "" reason "${reason}")  # pip's last line says it
      message(FATAL_ERROR "llama-cpp-python ${HYBRID_MOE_LLAMA_VERSION} could not be fetched: ${reason}\n"
              "Without a network pass -DHYBRID_MOE_LLAMA_SDIST=/path/to/llama_cpp_python-${HYBRID_MOE_LLAMA_VERSION}.tar.gz")
    endif()
    set(archive "${sdist_dir}/llama_cpp_python-${HYBRID_MOE_LLAMA_VERSION}.tar.gz")
  endif()
  if(NOT EXISTS "${archive}")
    message(FATAL_ERROR "HYBRID_MOE_LLAMA_SDIST=${archive} does not exist")
  endif()
  file(SHA256 "${archive}" found)
  if(NOT found STREQUAL HYBRID_MOE_LLAMA_SHA256)
    message(FATAL_ERROR "${archive} has SHA-256 ${found}, not the pinned ${HYBRID_MOE_LLAMA_SHA256}")
  endif()
  file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${sdist_dir}"
       PATTERNS "*/vendor/llama.cpp/ggml/include/*.h" "*/vendor/llama.cpp/ggml/src/*.h")
endif()

set(HYBRID_MOE_GGML_INCLUDE "${ggml_root}/include" "${ggml_root}/src")
