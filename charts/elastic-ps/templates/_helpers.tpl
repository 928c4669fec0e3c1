{{- define "elastic-ps.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "elastic-ps.selector" -}}
app.kubernetes.io/name: elastic-ps-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "elastic-ps.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "elastic-ps.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "elastic-ps.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "elastic-ps.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "elastic-ps.pullSecrets" -}}
{{- $names := list -}}
{{- range (.Values.global | default dict).imagePullSecrets -}}{{- $names = append $names (dict "name" .) -}}{{- end -}}
{{- concat (.Values.imagePullSecrets | default list) $names | toJson -}}
{{- end -}}

{{- define "elastic-ps.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* Every verb that the operator uses, and no other; a test compares. */ -}}
{{- define "elastic-ps.rules" -}}
- apiGroups: ["elastic-ps.dev"]
  resources: ["trainingjobs"]
  verbs: ["list", "watch", "delete"]
- apiGroups: ["elastic-ps.dev"]
  resources: ["trainingjobs/status"]
  verbs: ["patch"]
- apiGroups: [""]
  resources: ["pods"]
  verbs: ["get", "list", "watch", "create", "patch", "delete"]
- apiGroups: [""]
  resources: ["services"]
  verbs: ["get", "list", "watch", "create", "patch"]
- apiGroups: [""]
  resources: ["persistentvolumeclaims"]
  verbs: ["get", "list", "watch", "create", "patch"]
{{- if .Values.tls.enabled }}
- apiGroups: [""]
  resources: ["secrets"]
  verbs: ["create", "update"]
{{- end }}
{{- if .Values.jobNetworkPolicy.enabled }}
- apiGroups: ["networking.k8s.io"]
  resources: ["networkpolicies"]
  verbs: ["get", "list", "watch", "create"]
{{- end }}
- apiGroups: [""]
  resources: ["events"]
  verbs: ["create"]
{{- end -}}

{{- /* What the certificates of jobs are signed with. */ -}}
{{- define "elastic-ps.authority" -}}
{{- default (printf "%s-authority" (include "elastic-ps.fullname" .)) .Values.tls.existingSecret -}}
{{- end -}}

{{- /* What people may do who edit or view jobs. */ -}}
{{- define "elastic-ps.people" -}}
- apiGroups: ["elastic-ps.dev"]
  resources: ["trainingjobs"{{ if eq (index . 0) "edit" }}, "trainingjobs/scale"{{ end }}]
  verbs: [{{ range $i, $verb := index . 1 }}{{ if $i }}, {{ end }}{{ $verb | quote }}{{ end }}]
{{- end -}}

{{- /* Who may read the port 8080 of jobs: the operator's own pods, and those of the values. */ -}}
{{- define "elastic-ps.httpFrom" -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) -}}
{{- $pods := dict "matchLabels" (include "elastic-ps.selector" . | fromYaml) -}}
{{- concat (list (dict "namespaceSelector" $namespace "podSelector" $pods)) .Values.jobNetworkPolicy.httpFrom | toJson -}}
{{- end -}}

{{- /* For the admission policy, in CEL: what the values permit in the namespace of a request. The list is the root
       and the name of a field of templatePermissions. */ -}}
{{- define "elastic-ps.permitted.switch" -}}
{{- $name := index . 1 -}}
{{- $where := list -}}
{{- range $namespace, $given := (index . 0).Values.templatePermissions -}}
{{- if get (default dict $given) $name -}}{{- $where = append $where $namespace -}}{{- end -}}
{{- end -}}
{{- if has "*" $where -}} true {{- else -}} request.namespace in {{ toJson $where }} {{- end -}}
{{- end -}}

{{- /* Patterns as a shell has them become regular expressions. */ -}}
{{- define "elastic-ps.permitted.patterns" -}}
{{- $name := index . 1 -}}
{{- $all := dict -}}
{{- range $namespace, $given := (index . 0).Values.templatePermissions -}}
{{- $found := list -}}
{{- range (default list (get (default dict $given) $name)) -}}
{{- $found = append $found (printf "^%s$" (regexQuoteMeta . | replace "\\*" ".*" | replace "\\?" "." | replace "\\[!" "[^" | replace "\\[" "[" | replace "\\]" "]")) -}}
{{- end -}}
{{- $_ := set $all $namespace $found -}}
{{- end -}}
{{- include "elastic-ps.permitted.here" $all -}}
{{- end -}}

{{- define "elastic-ps.permitted.folders" -}}
{{- $name := index . 1 -}}
{{- $all := dict -}}
{{- range $namespace, $given := (index . 0).Values.templatePermissions -}}
{{- $found := list -}}
{{- range (default list (get (default dict $given) $name)) -}}
{{- $found = append $found (printf "%s/" (clean . | trimSuffix "/")) -}}
{{- end -}}
{{- $_ := set $all $namespace $found -}}
{{- end -}}
{{- include "elastic-ps.permitted.here" $all -}}
{{- end -}}

{{- define "elastic-ps.permitted.here" -}}
{{- $everywhere := default list (get . "*") -}}
{{ toJson (omit . "*") }}[?request.namespace].orValue([]) + {{ toJson $everywhere }}
{{- end -}}
