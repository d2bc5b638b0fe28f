# rafter_embed(OUTPUT file.cpp NAMESPACE a::b FUNCTION f FILES ...)
# Generates `std::span<const base::EmbeddedFile> f()`: every file's base name and contents, compiled in.
function(rafter_embed)
  cmake_parse_arguments(E "" "OUTPUT;NAMESPACE;FUNCTION" "FILES" ${ARGN})
  add_custom_command(
    OUTPUT ${E_OUTPUT}
    COMMAND ${CMAKE_COMMAND} "-DOUTPUT=${E_OUTPUT}" "-DNAMESPACE=${E_NAMESPACE}" "-DFUNCTION=${E_FUNCTION}"
            "-DFILES=${E_FILES}" -P ${CMAKE_SOURCE_DIR}/cmake/EmbedFiles.cmake
    DEPENDS ${E_FILES} ${CMAKE_SOURCE_DIR}/cmake/EmbedFiles.cmake
    COMMENT "Embedding files for ${E_FUNCTION}()" VERBATIM)
endfunction()
