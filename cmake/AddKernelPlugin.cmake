# add_kernel_plugin(TARGET): the plugin that gives MindSpore its kernels for one device, from what the current folder says of it
# and what is common to all.
function(add_kernel_plugin target)
  add_library(${target} MODULE plugin.cc ../common/groups.cc)
  target_include_directories(${target} PRIVATE .. ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_features(${target} PRIVATE cxx_std_17)
  target_compile_definitions(${target} PRIVATE KUNGFU_MINDSPORE_VERSION="${MindSporeWheel_VERSION}")
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  target_link_libraries(${target} PRIVATE kungfu_runtime MindSporeWheel::ops)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden BUILD_RPATH_USE_ORIGIN ON
                                             INSTALL_RPATH "$ORIGIN")
  install(TARGETS ${target} LIBRARY DESTINATION ms_kungfu)
endfunction()
