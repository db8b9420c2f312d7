# Install rules and the .deb package. Programs install themselves (glm53_executable).
install(DIRECTORY models/ DESTINATION "${CMAKE_INSTALL_DATADIR}/glm53/models" OPTIONAL)
if(EXISTS "${CMAKE_SOURCE_DIR}/config.toml.example")
  install(FILES config.toml.example DESTINATION "${CMAKE_INSTALL_DATADIR}/glm53")
endif()
