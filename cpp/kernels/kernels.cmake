# hybrid_moe_add_kernels(TARGET): the kernel files with their ISA flags, on those files only. No fused multiply-add by the
# compiler: a kernel's additions are as written.
set(HYBRID_MOE_KERNEL_DIR "${CMAKE_CURRENT_LIST_DIR}")

function(hybrid_moe_add_kernels target)
  set(common "-O3;-ffp-contract=off")
  if(HYBRID_MOE_SANITIZE)  # minutes of compiling otherwise
    set(common "-O1;-ffp-contract=off")
  endif()
  target_sources(${target} PRIVATE "${HYBRID_MOE_KERNEL_DIR}/weight_types.cpp" "${HYBRID_MOE_KERNEL_DIR}/select.cpp" "${HYBRID_MOE_KERNEL_DIR}/scalar.cpp"
                 "${HYBRID_MOE_KERNEL_DIR}/quants.cpp")
  set_source_files_properties("${HYBRID_MOE_KERNEL_DIR}/scalar.cpp" "${HYBRID_MOE_KERNEL_DIR}/quants.cpp" PROPERTIES COMPILE_OPTIONS "${common}")
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    return()
  endif()
  set(avx2 "${common};-mavx2;-mfma;-mf16c")
  set(avx512 "${common};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma;-mf16c")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # its own AVX-512 headers start from undefined registers on purpose
    list(APPEND avx512 "-Wno-uninitialized" "-Wno-maybe-uninitialized")
  endif()
  set(avx512_vbmi "${avx512};-mavx512vbmi")
  set(avx512_bf16 "${avx512_vbmi};-mavx512bf16")
  set(avx512_gfni "${avx512_bf16};-mgfni")
  foreach(file quants_avx2 quants_expand_avx2)
    target_sources(${target} PRIVATE "${HYBRID_MOE_KERNEL_DIR}/${file}.cpp")
    set_source_files_properties("${HYBRID_MOE_KERNEL_DIR}/${file}.cpp" PROPERTIES COMPILE_OPTIONS "${avx2}")
  endforeach()
  foreach(isa avx2 avx512 avx512_vbmi avx512_bf16 avx512_gfni)
    target_sources(${target} PRIVATE "${HYBRID_MOE_KERNEL_DIR}/${isa}.cpp")
    set_source_files_properties("${HYBRID_MOE_KERNEL_DIR}/${isa}.cpp" PROPERTIES COMPILE_OPTIONS "${${isa}}")
  endforeach()
endfunction()
