# Compiler settings and the helpers every folder uses: glm53_library(), glm53_executable(), glm53_test().
include(GNUInstallDirs)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g1 -DNDEBUG")

find_package(Threads REQUIRED)
find_program(GLM53_MOLD mold)
if(GLM53_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

add_library(glm53_options INTERFACE)
target_compile_options(glm53_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
  -Wnon-virtual-dtor -Woverloaded-virtual -Werror
  # A contracted multiply-add would make two kernels that should agree bit for bit differ.
  -ffp-contract=off)
target_include_directories(glm53_options INTERFACE "${CMAKE_SOURCE_DIR}")
target_link_libraries(glm53_options INTERFACE Threads::Threads)

if(GLM53_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(GLM53_SANITIZE STREQUAL "thread")
  # -Wno-tsan: Asio has fences, which the sanitizer does not see; its locks are seen.
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  target_compile_options(glm53_options INTERFACE -Wno-tsan)
  add_link_options(-fsanitize=thread)
elseif(NOT GLM53_SANITIZE STREQUAL "")
  message(FATAL_ERROR "GLM53_SANITIZE=${GLM53_SANITIZE}: expected empty, 'address' or 'thread'")
endif()
if(NOT GLM53_SANITIZE STREQUAL "")
  # With instrumentation gcc 12 takes members of std::function and boost::optional for uninitialised; the plain build checks.
  target_compile_options(glm53_options INTERFACE -Wno-maybe-uninitialized)
endif()

# What a layer may link. A target that asks for anything else stops the configure step, so the arrows of
# docs/architecture.md cannot turn round by accident.
set(GLM53_MAY_common "")
set(GLM53_MAY_kernels common)
set(GLM53_MAY_loader common kernels)
set(GLM53_MAY_comm common kernels)
set(GLM53_MAY_model common kernels comm loader)
set(GLM53_MAY_wire common)
set(GLM53_MAY_prefix common kernels)
set(GLM53_MAY_spill common)
set(GLM53_MAY_draft common kernels comm loader model)
set(GLM53_MAY_text common)
set(GLM53_MAY_grammar common text)
set(GLM53_MAY_runtime common kernels comm loader model draft wire prefix spill text grammar)
set(GLM53_MAY_api common text grammar wire)
set(GLM53_MAY_state common)
set(GLM53_MAY_reconcile common)
set(GLM53_MAY_supervise common)
set(GLM53_MAY_hub common state)
set(GLM53_MAY_preflight common)
set(GLM53_MAY_sync common state hub)
set(GLM53_MAY_trust common)
set(GLM53_MAY_image common hub)
set(GLM53_MAY_agent_api common state reconcile supervise preflight hub sync trust image)
set(GLM53_MAY_cli common)

# glm53_library(LAYER SOURCES f.. [DEPS layer..] [LIBS external..]) makes the target glm53_LAYER.
function(glm53_library layer)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS;LIBS;PRIVATE_LIBS" ${ARGN})
  if(NOT DEFINED GLM53_MAY_${layer})
    message(FATAL_ERROR "layer '${layer}' has no entry in cmake/Glm53.cmake")
  endif()
  foreach(dep ${A_DEPS})
    if(NOT dep IN_LIST GLM53_MAY_${layer})
      message(FATAL_ERROR "layer '${layer}' must not depend on '${dep}' (cmake/Glm53.cmake, docs/architecture.md)")
    endif()
  endforeach()
  add_library(glm53_${layer} STATIC ${A_SOURCES})
  list(TRANSFORM A_DEPS PREPEND glm53_)
  target_link_libraries(glm53_${layer} PUBLIC glm53_options ${A_DEPS} ${A_LIBS} PRIVATE ${A_PRIVATE_LIBS})
endfunction()

# glm53_executable(NAME SOURCES f.. DEPS layer.. [LIBS external..]): an installed program.
function(glm53_executable name)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS;LIBS" ${ARGN})
  add_executable(${name} ${A_SOURCES})
  list(TRANSFORM A_DEPS PREPEND glm53_)
  target_link_libraries(${name} PRIVATE glm53_options ${A_DEPS} ${A_LIBS})
  # A program of the build tree may be put into a bundle, with its libraries in ../lib (scripts/bundle.sh); an installed one not.
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin" BUILD_RPATH "$ORIGIN/../lib")
  target_link_options(${name} PRIVATE LINKER:--disable-new-dtags)
  install(TARGETS ${name} RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endfunction()

# glm53_test(NAME SOURCES f.. DEPS layer..): a doctest program in build/tests; NAME starts with its tier
# (unit_, golden_, e2e_), by which scripts/test.sh finds it.
function(glm53_test name)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS;LIBS" ${ARGN})
  if(NOT GLM53_TESTS)
    return()
  endif()
  add_executable(${name} ${A_SOURCES})
  list(TRANSFORM A_DEPS PREPEND glm53_)
  target_link_libraries(${name} PRIVATE glm53_options glm53_test_main ${A_DEPS} ${A_LIBS})
  target_compile_definitions(${name} PRIVATE
    GLM53_SOURCE_DIR="${CMAKE_SOURCE_DIR}" GLM53_BINARY_DIR="${CMAKE_BINARY_DIR}")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
endfunction()
