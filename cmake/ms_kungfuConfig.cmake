# find_package(ms_kungfu) for C and C++: defines the target ms_kungfu::runtime, with the headers of kungfu/. This file
# is in the Python package: set -Dms_kungfu_DIR to the folder that `python -m ms_kungfu.c_api --cmakedir` prints.
get_filename_component(_ms_kungfu_package "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
if(NOT TARGET ms_kungfu::runtime)
  add_library(ms_kungfu::runtime SHARED IMPORTED)
  # The same file that Python's ms_kungfu loads: two copies in one process would be two members of the cluster.
  set_target_properties(ms_kungfu::runtime PROPERTIES
    IMPORTED_LOCATION "${_ms_kungfu_package}/libkungfu_runtime.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_ms_kungfu_package}/include")
endif()
unset(_ms_kungfu_package)
