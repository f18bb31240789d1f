# Memory that a graphics API keeps: resources of OpenGL, EGL and VDPAU, and the ends of EGL streams.  Each is counted
# while it is registered or connected.  Contexts that are made for such an API are followed as all others.


cdef public CUresult cuGraphicsGLRegisterBuffer(CUgraphicsResource *pCudaResource, unsigned int buffer,
                                                unsigned int Flags) noexcept nogil:
    """Register a buffer of OpenGL."""
    cdef CUresult rc
    if gs_real.cuGraphicsGLRegisterBuffer == NULL and not gs_find(<void *>&gs_real.cuGraphicsGLRegisterBuffer):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphicsGLRegisterBuffer(pCudaResource, buffer, Flags)
    if rc == 0:
        uncarried_add(KIND_GRAPHICS, <uint64_t>pCudaResource[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGraphicsGLRegisterImage(CUgraphicsResource *pCudaResource, unsigned int image,
                                               unsigned int target, unsigned int Flags) noexcept nogil:
    """Register a texture of OpenGL."""
    cdef CUresult rc
    if gs_real.cuGraphicsGLRegisterImage == NULL and not gs_find(<void *>&gs_real.cuGraphicsGLRegisterImage):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphicsGLRegisterImage(pCudaResource, image, target, Flags)
    if rc == 0:
        uncarried_add(KIND_GRAPHICS, <uint64_t>pCudaResource[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGraphicsEGLRegisterImage(CUgraphicsResource *pCudaResource, void *image,
                                                unsigned int flags) noexcept nogil:
    """Register an image of EGL."""
    cdef CUresult rc
    if gs_real.cuGraphicsEGLRegisterImage == NULL and not gs_find(<void *>&gs_real.cuGraphicsEGLRegisterImage):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphicsEGLRegisterImage(pCudaResource, image, flags)
    if rc == 0:
        uncarried_add(KIND_GRAPHICS, <uint64_t>pCudaResource[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGraphicsVDPAURegisterVideoSurface(CUgraphicsResource *pCudaResource, cuuint32_t vdpSurface,
                                                         unsigned int flags) noexcept nogil:
    """Register a surface of VDPAU."""
    cdef CUresult rc
    if (gs_real.cuGraphicsVDPAURegisterVideoSurface == NULL
            and not gs_find(<void *>&gs_real.cuGraphicsVDPAURegisterVideoSurface)):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphicsVDPAURegisterVideoSurface(pCudaResource, vdpSurface, flags)
    if rc == 0:
        uncarried_add(KIND_GRAPHICS, <uint64_t>pCudaResource[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGraphicsVDPAURegisterOutputSurface(CUgraphicsResource *pCudaResource, cuuint32_t vdpSurface,
                                                          unsigned int flags) noexcept nogil:
    """Register a surface of VDPAU."""
    cdef CUresult rc
    if (gs_real.cuGraphicsVDPAURegisterOutputSurface == NULL
            and not gs_find(<void *>&gs_real.cuGraphicsVDPAURegisterOutputSurface)):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphicsVDPAURegisterOutputSurface(pCudaResource, vdpSurface, flags)
    if rc == 0:
        uncarried_add(KIND_GRAPHICS, <uint64_t>pCudaResource[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGraphicsUnregisterResource(CUgraphicsResource resource) noexcept nogil:
    """Let a resource go."""
    cdef CUresult rc
    if gs_real.cuGraphicsUnregisterResource == NULL and not gs_find(<void *>&gs_real.cuGraphicsUnregisterResource):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGraphicsUnregisterResource(resource)
    if rc == 0:
        uncarried_remove(KIND_GRAPHICS, <uint64_t>resource)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGLRegisterBufferObject(unsigned int buffer) noexcept nogil:
    """Register a buffer of OpenGL by its name."""
    cdef CUresult rc
    if gs_real.cuGLRegisterBufferObject == NULL and not gs_find(<void *>&gs_real.cuGLRegisterBufferObject):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGLRegisterBufferObject(buffer)
    if rc == 0:
        uncarried_add(KIND_GRAPHICS, buffer)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGLUnregisterBufferObject(unsigned int buffer) noexcept nogil:
    """Let a buffer of OpenGL go."""
    cdef CUresult rc
    if gs_real.cuGLUnregisterBufferObject == NULL and not gs_find(<void *>&gs_real.cuGLUnregisterBufferObject):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuGLUnregisterBufferObject(buffer)
    if rc == 0:
        uncarried_remove(KIND_GRAPHICS, buffer)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuEGLStreamConsumerConnect(CUeglStreamConnection *conn, void *stream) noexcept nogil:
    """Take frames from a stream of EGL."""
    cdef CUresult rc
    if gs_real.cuEGLStreamConsumerConnect == NULL and not gs_find(<void *>&gs_real.cuEGLStreamConsumerConnect):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuEGLStreamConsumerConnect(conn, stream)
    if rc == 0:
        uncarried_add(KIND_GRAPHICS, <uint64_t>conn[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuEGLStreamConsumerConnectWithFlags(CUeglStreamConnection *conn, void *stream,
                                                         unsigned int flags) noexcept nogil:
    """Take frames from a stream of EGL."""
    cdef CUresult rc
    if (gs_real.cuEGLStreamConsumerConnectWithFlags == NULL
            and not gs_find(<void *>&gs_real.cuEGLStreamConsumerConnectWithFlags)):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuEGLStreamConsumerConnectWithFlags(conn, stream, flags)
    if rc == 0:
        uncarried_add(KIND_GRAPHICS, <uint64_t>conn[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuEGLStreamConsumerDisconnect(CUeglStreamConnection *conn) noexcept nogil:
    """Take no more frames."""
    cdef CUresult rc
    cdef uint64_t connection
    if gs_real.cuEGLStreamConsumerDisconnect == NULL and not gs_find(<void *>&gs_real.cuEGLStreamConsumerDisconnect):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    connection = <uint64_t>conn[0] if conn != NULL else 0
    rc = gs_real.cuEGLStreamConsumerDisconnect(conn)
    if rc == 0:
        uncarried_remove(KIND_GRAPHICS, connection)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuEGLStreamProducerConnect(CUeglStreamConnection *conn, void *stream, int width,
                                                int height) noexcept nogil:
    """Give frames to a stream of EGL."""
    cdef CUresult rc
    if gs_real.cuEGLStreamProducerConnect == NULL and not gs_find(<void *>&gs_real.cuEGLStreamProducerConnect):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = gs_real.cuEGLStreamProducerConnect(conn, stream, width, height)
    if rc == 0:
        uncarried_add(KIND_GRAPHICS, <uint64_t>conn[0])
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuEGLStreamProducerDisconnect(CUeglStreamConnection *conn) noexcept nogil:
    """Give no more frames."""
    cdef CUresult rc
    cdef uint64_t connection
    if gs_real.cuEGLStreamProducerDisconnect == NULL and not gs_find(<void *>&gs_real.cuEGLStreamProducerDisconnect):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    connection = <uint64_t>conn[0] if conn != NULL else 0
    rc = gs_real.cuEGLStreamProducerDisconnect(conn)
    if rc == 0:
        uncarried_remove(KIND_GRAPHICS, connection)
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGLCtxCreate(CUcontext *pCtx, unsigned int Flags, CUdevice device) noexcept nogil:
    """Create a context for OpenGL (ABI of CUDA 2)."""
    cdef CUresult rc
    if gs_real.cuGLCtxCreate == NULL and not gs_find(<void *>&gs_real.cuGLCtxCreate):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = context_created(pCtx, device, gs_real.cuGLCtxCreate(pCtx, Flags, device))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuGLCtxCreate_v2(CUcontext *pCtx, unsigned int Flags, CUdevice device) noexcept nogil:
    """Create a context for OpenGL."""
    cdef CUresult rc
    if gs_real.cuGLCtxCreate_v2 == NULL and not gs_find(<void *>&gs_real.cuGLCtxCreate_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = context_created(pCtx, device, gs_real.cuGLCtxCreate_v2(pCtx, Flags, device))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuVDPAUCtxCreate(CUcontext *pCtx, unsigned int flags, CUdevice device, cuuint32_t vdpDevice,
                                      void *vdpGetProcAddress) noexcept nogil:
    """Create a context for VDPAU (ABI of CUDA 3.1)."""
    cdef CUresult rc
    if gs_real.cuVDPAUCtxCreate == NULL and not gs_find(<void *>&gs_real.cuVDPAUCtxCreate):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = context_created(pCtx, device, gs_real.cuVDPAUCtxCreate(pCtx, flags, device, vdpDevice, vdpGetProcAddress))
    gs_leave(GS_MEMORY)
    return rc


cdef public CUresult cuVDPAUCtxCreate_v2(CUcontext *pCtx, unsigned int flags, CUdevice device,
                                         cuuint32_t vdpDevice, void *vdpGetProcAddress) noexcept nogil:
    """Create a context for VDPAU."""
    cdef CUresult rc
    if gs_real.cuVDPAUCtxCreate_v2 == NULL and not gs_find(<void *>&gs_real.cuVDPAUCtxCreate_v2):
        return gs_absent()
    gs_enter(GS_MEMORY, NULL, GS_NO_STREAM)
    rc = context_created(pCtx, device, gs_real.cuVDPAUCtxCreate_v2(pCtx, flags, device, vdpDevice, vdpGetProcAddress))
    gs_leave(GS_MEMORY)
    return rc
