# Finds the installed MindSpore wheel, and defines what a kernel plugin needs from it.
#
# Looks at -DMINDSPORE_ROOT (the package's folder), then at the environment variable of that name, then at the package
# that Python (Python_EXECUTABLE) would import. Sets MindSporeWheel_FOUND, MindSporeWheel_ROOT and
# MindSporeWheel_VERSION, and defines the target MindSporeWheel::ops.
set(MindSporeWheel_ROOT "${MINDSPORE_ROOT}")
if(NOT MindSporeWheel_ROOT)
  set(MindSporeWheel_ROOT "$ENV{MINDSPORE_ROOT}")
endif()
if(NOT MindSporeWheel_ROOT AND Python_EXECUTABLE)
  # find_spec doesn't import MindSpore, which would take seconds. In an isolated build, pip hides the
  # interpreter's own packages by setting PYTHONPATH, which -E ignores.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -E -c
            "import importlib.util as u; s = u.find_spec('mindspore'); print(s.submodule_search_locations[0] if s else '', end='')"
    OUTPUT_VARIABLE MindSporeWheel_ROOT)
endif()

if(MindSporeWheel_ROOT AND EXISTS "${MindSporeWheel_ROOT}/version.py")
  file(READ "${MindSporeWheel_ROOT}/version.py" _version)
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+[a-z0-9.]*" MindSporeWheel_VERSION "${_version}")
endif()
if(MindSporeWheel_ROOT AND EXISTS "${MindSporeWheel_ROOT}/include/mindspore/ops/kernel/cpu/cpu_kernel.h")
  set(MindSporeWheel_CPU_KERNEL_H "${MindSporeWheel_ROOT}/include/mindspore/ops/kernel/cpu/cpu_kernel.h")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  MindSporeWheel
  REQUIRED_VARS MindSporeWheel_ROOT MindSporeWheel_VERSION MindSporeWheel_CPU_KERNEL_H
  VERSION_VAR MindSporeWheel_VERSION)

if(MindSporeWheel_FOUND AND NOT TARGET MindSporeWheel::ops)
  add_library(MindSporeWheel::ops INTERFACE IMPORTED)
  foreach(_folder . include include/third_party include/third_party/robin_hood_hashing
                  include/third_party/securec/include include/mindspore include/mindspore/include
                  include/mindspore/core/include include/mindspore/core/mindrt/include include/mindspore/core/mindrt
                  include/mindspore/ops include/mindspore/ops/include include/mindspore/ops/kernel/include
                  include/mindspore/ccsrc include/mindspore/ccsrc/include
                  include/mindspore/ccsrc/minddata/mindrecord/include)
    if(IS_DIRECTORY "${MindSporeWheel_ROOT}/${_folder}")
      target_include_directories(MindSporeWheel::ops SYSTEM INTERFACE "${MindSporeWheel_ROOT}/${_folder}")
    endif()
  endforeach()
  # MindSpore is built with the old ABI of libstdc++, and its hash maps are part of the interface.
  target_compile_definitions(MindSporeWheel::ops INTERFACE _GLIBCXX_USE_CXX11_ABI=0 ENABLE_FAST_HASH_TABLE=1)
  # The messages of MindSpore's headers also contain __FILE__.
  target_compile_options(MindSporeWheel::ops INTERFACE "-ffile-prefix-map=${MindSporeWheel_ROOT}=mindspore")
  # The libraries differ between versions of MindSpore. The plugin contains only their names, without paths: `import
  # mindspore` loads the libraries before the plugin, and the loader finds them by SONAME.
  target_link_options(MindSporeWheel::ops INTERFACE -Wl,--as-needed "-Wl,-rpath-link,${MindSporeWheel_ROOT}/lib"
                      -Wl,--allow-shlib-undefined)
  foreach(_name core common ops ops_host ops_kernel_common backend_common hardware_abstract runtime_pipeline runtime_utils)
    set(_library "${MindSporeWheel_ROOT}/lib/libmindspore_${_name}.so")
    if(EXISTS "${_library}")
      target_link_libraries(MindSporeWheel::ops INTERFACE "${_library}")
    endif()
  endforeach()
endif()
