{{/* The pod of a pool. Its labels have no version of the chart: an upgrade that changes nothing else restarts no engine.
     dict "root" $ "pool" NAME */}}
{{- define "vllm.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $pool := get $values .pool -}}
metadata:
  labels:
    {{- include "vllm.selectorLabels" (dict "root" $root "component" .pool) | nindent 4 }}
    {{- with $values.kvstore.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    {{- merge (dict) $values.podAnnotations (include "vllm.evictable" $root | fromYaml) | toYaml | nindent 4 }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $values.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  # The preStop hook's seconds, those of requests and saves, and some for the processes to end.
  terminationGracePeriodSeconds: {{ add 10 (int64 $values.shutdownSeconds) 20 }}
  {{- include "vllm.initContainers" $root | nindent 2 }}
  containers:
    - name: vllm
      image: {{ include "vllm.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [vllm, serve]
      workingDir: /home/engine
      args:
        - {{ $values.model | quote }}
        - --config
        - /etc/kvstore/{{ $pool.kind }}.yaml
        - --port
        - "8000"
        - --shutdown-timeout
        - {{ $values.shutdownSeconds | int64 | quote }}
        {{- with $values.servedModelName }}
        - --served-model-name
        - {{ . | quote }}
        {{- end }}
        {{- range $pool.args }}
        - {{ . | quote }}
        {{- end }}
      ports:
        - name: http
          containerPort: 8000
      env:
        {{- include "vllm.storeEnv" $root | nindent 8 }}
        {{- include "vllm.env" $root | nindent 8 }}
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (int64 $values.startSeconds) 5 }}
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 3
      # An engine that is dead says so at once; one that computes long prompts may answer late.
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      lifecycle:
        # Until Services and routers have heard that the pod goes.
        preStop:
          exec:
            command: [sleep, "10"]
      resources:
        {{- toYaml $pool.resources | nindent 8 }}
      securityContext:
        {{- toYaml $values.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "vllm.storeVolumeMounts" $root | nindent 8 }}
        {{- include "vllm.volumeMounts" $root | nindent 8 }}
  volumes:
    {{- include "vllm.storeVolumes" $root | nindent 4 }}
    {{- include "vllm.volumes" $root | nindent 4 }}
  {{- include "vllm.scheduling" $root | nindent 2 }}
{{- end -}}

{{/* What puts kvstore beside vLLM, and gives the node's cache to the engines' user. */}}
{{- define "vllm.initContainers" -}}
{{- $install := .Values.kvstore.install -}}
{{- $nodeCache := include "vllm.nodeCache" . -}}
{{- if or $install.enabled $nodeCache -}}
initContainers:
  {{- if $install.enabled }}
  - name: wheels
    image: {{ include "vllm.wheelsImage" . }}
    imagePullPolicy: {{ $install.image.pullPolicy }}
    command: [python3, -c, "import shutil; shutil.copytree('/wheels', '/opt/wheels/kvstore', dirs_exist_ok=True)"]
    resources:
      {{- toYaml $install.resources | nindent 6 }}
    securityContext:
      {{- toYaml .Values.securityContext | nindent 6 }}
    volumeMounts:
      - name: wheels
        mountPath: /opt/wheels
  - name: install
    image: {{ include "vllm.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [sh, /opt/install/install.sh, /opt/wheels/kvstore, /opt/kvstore, {{ $install.requirement | quote }}]
    env:
      - name: HOME
        value: /tmp
    resources:
      {{- toYaml $install.resources | nindent 6 }}
    securityContext:
      {{- toYaml .Values.securityContext | nindent 6 }}
    volumeMounts:
      - name: wheels
        mountPath: /opt/wheels
        readOnly: true
      - name: tmp
        mountPath: /tmp
      - name: install
        mountPath: /opt/install
        readOnly: true
      - name: package
        mountPath: /opt/kvstore
  {{- end }}
  {{- if $nodeCache }}
  - name: node-cache
    image: {{ include "vllm.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [chown, "{{ .Values.podSecurityContext.runAsUser | default 0 | int64 }}:{{ .Values.podSecurityContext.runAsGroup | default 0 | int64 }}", {{ $nodeCache | quote }}]
    resources:
      {{- toYaml $install.resources | nindent 6 }}
    securityContext:
      runAsNonRoot: false
      runAsUser: 0
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL], add: [CHOWN]}
    volumeMounts:
      - name: node-cache
        mountPath: {{ $nodeCache | quote }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "vllm.env" -}}
{{- if .Values.kvstore.install.enabled -}}
- name: PYTHONPATH
  value: /opt/kvstore
{{ end -}}
# All that vLLM and its compilers write goes below HOME; a user that the image doesn't know has no name of its own.
- name: HOME
  value: /home/engine
- name: USER
  value: vllm
- name: HF_HOME
  value: /models
{{- if and .Values.weights.existingClaim .Values.weights.readOnly }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with .Values.weights.tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: {{ $.Values.weights.tokenKey | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "vllm.volumeMounts" -}}
{{- if .Values.kvstore.install.enabled -}}
- name: package
  mountPath: /opt/kvstore
  readOnly: true
{{ end -}}
- name: models
  mountPath: /models
  {{- if and .Values.weights.existingClaim .Values.weights.readOnly }}
  readOnly: true
  {{- end }}
- name: home
  mountPath: /home/engine
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "vllm.volumes" -}}
{{- if .Values.kvstore.install.enabled -}}
- name: package
  emptyDir: {sizeLimit: 1Gi}
- name: wheels
  emptyDir: {sizeLimit: 1Gi}
- name: install
  configMap:
    name: {{ include "vllm.fullname" . }}-files
    items:
      - {key: install.sh, path: install.sh}
{{ end -}}
- name: models
  {{- if .Values.weights.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.weights.existingClaim | quote }}
    readOnly: {{ .Values.weights.readOnly }}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.weights.sizeLimit | quote }}}
  {{- end }}
- name: home
  emptyDir: {sizeLimit: 20Gi}
- name: tmp
  emptyDir: {sizeLimit: 10Gi}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory | quote }}}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "vllm.scheduling" -}}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
