# An image with this package, for CPUs, NVIDIA GPUs or TPU VMs:
#
#   docker build --build-arg PLATFORM=cpu -t lingvo_gshard .
#   docker run -it -v "$PWD/runs:/runs" lingvo_gshard gshard-train --experiment=translation.quickstart --logdir=/runs/quickstart
#
# PLATFORM is cpu, cuda or tpu. `.ci/install_image` has the steps, which any Debian root runs.
FROM debian:bookworm-slim
ARG PLATFORM=cpu
COPY . /opt/lingvo_gshard
RUN /opt/lingvo_gshard/.ci/install_image "$PLATFORM"
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /work
CMD ["gshard-doctor"]
