# rafter_git_commit(OUTPUT file.h): at every build, a header that defines RAFTER_GIT_COMMIT, touched
# only when the commit (or whether the tree differs from it) has changed. As a script (cmake -P) it
# is what writes the header.
if(CMAKE_SCRIPT_MODE_FILE)
  set(commit "unknown")
  execute_process(COMMAND git -C ${SOURCE} rev-parse --short=12 HEAD
    OUTPUT_VARIABLE head OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(NOT failed)
    set(commit ${head})
    execute_process(COMMAND git -C ${SOURCE} diff --quiet HEAD RESULT_VARIABLE dirty ERROR_QUIET)
    if(dirty)
      string(APPEND commit "-modified")
    endif()
  endif()
  set(text "#pragma once\n#define RAFTER_GIT_COMMIT \"${commit}\"\n")
  set(before "")
  if(EXISTS ${OUTPUT})
    file(READ ${OUTPUT} before)
  endif()
  if(NOT before STREQUAL text)
    file(WRITE ${OUTPUT} "${text}")
  endif()
else()
  function(rafter_git_commit)
    cmake_parse_arguments(G "" "OUTPUT" "" ${ARGN})
    add_custom_target(rafter_git_commit BYPRODUCTS ${G_OUTPUT}
      COMMAND ${CMAKE_COMMAND} -DSOURCE=${CMAKE_SOURCE_DIR} -DOUTPUT=${G_OUTPUT}
              -P ${CMAKE_SOURCE_DIR}/cmake/GitCommit.cmake
      COMMENT "Reading the commit" VERBATIM)
  endfunction()
endif()
