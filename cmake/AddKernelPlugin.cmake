# add_kernel_plugin(NAME): build the plugin with the kernels for one device, from the sources in the current folder and
# the common sources. Sets `plugin` to the plugin's target.
function(add_kernel_plugin name)
  set(target ${name}-${MindSporeWheel_VERSION})
  add_library(${target} MODULE plugin.cc ../common/groups.cc)
  target_include_directories(${target} PRIVATE .. ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_features(${target} PRIVATE cxx_std_17)
  target_compile_definitions(${target} PRIVATE KUNGFU_MINDSPORE_VERSION="${MindSporeWheel_VERSION}")
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  target_link_libraries(${target} PRIVATE kungfu_runtime MindSporeWheel::ops)
  # The runtime is two folders up. Unity build: MindSpore's headers take 10 to 20 s to compile, so compile them once.
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name} CXX_VISIBILITY_PRESET hidden BUILD_RPATH_USE_ORIGIN ON
                                             INSTALL_RPATH "$ORIGIN/../.." UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  install(TARGETS ${target} LIBRARY DESTINATION ms_kungfu/plugins/${MindSporeWheel_VERSION})
  set(plugin ${target} PARENT_SCOPE)
endfunction()
