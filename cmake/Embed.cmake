# glm53_embed(OUT HEADER FILES f..): makes a source file that holds the files' text, and puts its path into OUT. HEADER, from the
# root of the sources, declares `std::string_view NAME();` for each of them, in the namespace that NAMESPACE names; NAME is the
# file's name as a C identifier. A change of a file configures anew.
function(glm53_embed out)
  cmake_parse_arguments(A "" "HEADER;NAMESPACE" "FILES" ${ARGN})
  set(embedded_code "")
  foreach(file ${A_FILES})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${file}")
    file(READ "${CMAKE_CURRENT_SOURCE_DIR}/${file}" content)
    get_filename_component(name "${file}" NAME)
    string(MAKE_C_IDENTIFIER "${name}" name)
    string(APPEND embedded_code
      "std::string_view ${name}() {\n  return R\"EMBEDDED(${content})EMBEDDED\";\n}\n\n")
  endforeach()
  set(embedded_header "${A_HEADER}")
  set(embedded_namespace "${A_NAMESPACE}")
  configure_file("${CMAKE_SOURCE_DIR}/cmake/embedded.cpp.in" "${CMAKE_CURRENT_BINARY_DIR}/embedded.cpp" @ONLY)
  set(${out} "${CMAKE_CURRENT_BINARY_DIR}/embedded.cpp" PARENT_SCOPE)
endfunction()
