# `cmake --install`: the library for find_package(Rafter) and for pkg-config, the tool, the headers.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(RAFTER_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Rafter)

install(TARGETS rafter rafter_c EXPORT RafterTargets ARCHIVE COMPONENT devel
  LIBRARY COMPONENT runtime NAMELINK_COMPONENT devel)
install(FILES ${RAFTER_PUBLIC_HEADERS} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/rafter COMPONENT devel)
if(TARGET rafter_tool)
  install(TARGETS rafter_tool RUNTIME COMPONENT runtime)
endif()

install(EXPORT RafterTargets NAMESPACE rafter:: DESTINATION ${RAFTER_CMAKE_DIR} COMPONENT devel)
configure_package_config_file(cmake/RafterConfig.cmake.in
  ${CMAKE_BINARY_DIR}/package/RafterConfig.cmake INSTALL_DESTINATION ${RAFTER_CMAKE_DIR})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/package/RafterConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/package/RafterConfig.cmake
  ${CMAKE_BINARY_DIR}/package/RafterConfigVersion.cmake
  DESTINATION ${RAFTER_CMAKE_DIR} COMPONENT devel)

# ---- `cpack` in a build folder: one Debian package, its dependencies read from the libraries
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME rafter)
set(CPACK_PACKAGE_CONTACT "the authors of Rafter <rafter@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_RESOURCE_FILE_LICENSE ${CMAKE_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL runtime devel)  # the Python package comes from pip
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
# What find_package(Rafter) asks for in turn.
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libfmt-dev, libdnnl-dev, libhwy-dev, ocl-icd-opencl-dev")
include(CPack)

# ---- pkg-config; the prefix is found from where the file lies, so that an install can be moved
file(RELATIVE_PATH RAFTER_PC_PREFIX /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
set(RAFTER_PC_LIBS "-ldnnl -lgomp -lpthread")
if(RAFTER_HAS_CUDA)
  string(APPEND RAFTER_PC_LIBS " $<TARGET_FILE:CUDA::cudart_static> -lrt -ldl")
endif()
configure_file(cmake/rafter-c.pc.in ${CMAKE_BINARY_DIR}/package/rafter-c.pc @ONLY)
configure_file(cmake/rafter.pc.in ${CMAKE_BINARY_DIR}/package/rafter.pc.in @ONLY)
file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/package/rafter.pc
  INPUT ${CMAKE_BINARY_DIR}/package/rafter.pc.in)
install(FILES ${CMAKE_BINARY_DIR}/package/rafter.pc ${CMAKE_BINARY_DIR}/package/rafter-c.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT devel)
